"""`idempotency demo`: flights to both projectors, or orders to both sides, again and by workers that are killed."""
