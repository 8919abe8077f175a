"""Documents as text: files, records, tokenizers."""
