"""Checkpoints: write, verify, find, load, convert."""
