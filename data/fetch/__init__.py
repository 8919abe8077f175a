"""Fetches blocks of remote corpora ahead of training, in one process per node."""
