"""The live view of a run, and of all runs under a directory, in a terminal. Reads; the only thing it writes is an
acknowledgement. No torch."""
