"""The local record: journal, metrics, status. Append-only files are the truth, everything else is a view of them."""
