"""The main job: one start of a run. It assembles the trainer and the services that watch, steer and copy beside it."""
