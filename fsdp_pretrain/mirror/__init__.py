"""Copies checkpoints and record of a run to object storage, and restores them from there."""
