"""Documents as text: files, splitting, tokenizers. No torch."""
