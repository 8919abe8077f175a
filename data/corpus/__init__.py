"""Corpora of token shards: their files and formats."""
