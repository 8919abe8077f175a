"""The line of starts that made a run: going back, forking, and where a sample or a step came from. No torch."""
