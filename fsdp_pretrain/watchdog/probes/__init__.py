"""Looks at storage that may hang, in a process of their own. No torch."""
