"""Probes of storage that may hang, in a separate process. No torch."""
