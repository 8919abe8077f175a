"""Documents as text: files, records, tokenizers. No torch."""
