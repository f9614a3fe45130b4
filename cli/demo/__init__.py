"""`idempotency demo`: real flights, delivered twice and by workers that crash, to both projectors."""
