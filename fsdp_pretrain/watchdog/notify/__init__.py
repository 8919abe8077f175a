"""Delivery of alarms to people (which messages, their text, the channels), and export of metrics."""
