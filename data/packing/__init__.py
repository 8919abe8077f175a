"""From corpora to batches: mixture, packing, objectives, the loader."""
