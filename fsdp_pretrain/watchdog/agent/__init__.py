"""A node's watchdog process, and what the leading one does besides. No torch."""
