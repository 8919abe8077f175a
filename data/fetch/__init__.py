"""Fetching blocks of corpora ahead of training, one process per node."""
