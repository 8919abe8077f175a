"""The live view of a run, and of all runs under a directory, in a terminal. It only reads, and needs no torch."""
