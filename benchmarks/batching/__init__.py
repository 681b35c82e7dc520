"""What keyed batching costs."""
