"""Hang detection: whether ranks make progress, which one is the cause, and what is done."""
