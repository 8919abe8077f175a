"""What a rank reports about itself, through shared memory."""
