"""The main job: one start of a run, which assembles the trainer and what watches, steers and copies beside it."""
