"""The run directory: what is written there, by whom, and how it is read. No torch."""
