"""Checkpoints: write, verify, find, load."""
