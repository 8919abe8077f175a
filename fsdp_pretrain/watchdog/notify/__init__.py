"""From an alarm to a person: what is sent, messages, channels; and metrics."""
