"""Computes what a run will need before it starts: steps, memory, disk, FLOPs."""
