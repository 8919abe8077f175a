"""Starting torchrun again and again, and knowing when not to. No torch."""
