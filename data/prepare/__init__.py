"""Makes corpora from text or from existing token files."""
