"""The watchdog: a process beside the ranks that observes, tells, and as a last resort ends them. No torch."""
