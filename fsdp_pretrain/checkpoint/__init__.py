"""Checkpoints: written, committed, verified, found, loaded, converted."""
