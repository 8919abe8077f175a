"""Trains recorded steps again from a checkpoint, to tell whether data, settings or numerics explain a result."""
