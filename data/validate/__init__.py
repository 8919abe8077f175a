"""Checks that a corpus is what it claims to be, separators above all."""
