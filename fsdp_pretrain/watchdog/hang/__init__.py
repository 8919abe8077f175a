"""Whether ranks have stopped, which one is the cause, and what is done about it. No torch."""
