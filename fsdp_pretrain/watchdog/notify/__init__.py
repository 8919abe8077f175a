"""From an alarm to a person: throttling, messages, channels, operators, Prometheus."""
