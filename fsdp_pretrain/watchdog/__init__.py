"""The watchdog of a run: an agent per node, fed by a heartbeat page per rank."""
