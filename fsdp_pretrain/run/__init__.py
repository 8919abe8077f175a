"""The run directory: writers and readers of its files."""
