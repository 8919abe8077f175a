"""Detectors: each looks at one thing, and opens and resolves its alarms. No torch."""
