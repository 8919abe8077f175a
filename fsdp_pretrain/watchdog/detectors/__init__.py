"""Detectors: each watches one thing, and opens and resolves its alarms."""
