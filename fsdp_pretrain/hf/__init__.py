"""Models as Hugging Face folders: exported from checkpoints, and imported into new runs."""
