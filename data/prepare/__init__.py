"""Making corpora, from text or from token files of others. No torch."""
