"""Checkpoints: `store` decides which exist (no torch), `dcp` fills and reads them."""
