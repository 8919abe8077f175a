"""Looks at storage and devices that may hang, in threads of their own."""
