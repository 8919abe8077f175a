"""Checkpoints and record of a run, carried out to object storage and back."""
