"""A run, or several, as one HTML page, rebuilt from the record: curves, checkpoints, evaluations, events, goodput."""
