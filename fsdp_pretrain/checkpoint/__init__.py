"""Checkpoints: `store` decides which exist (no torch), `dcp` writes them, `loading` reads them."""
