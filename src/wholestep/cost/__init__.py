"""What communication costs."""
