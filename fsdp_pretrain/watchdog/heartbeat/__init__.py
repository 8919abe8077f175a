"""What a rank reports of itself, through shared memory. No torch."""
