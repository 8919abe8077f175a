"""Training: steps, the loop around them, and saves. Services attach to it as observers."""
