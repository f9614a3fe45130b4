"""The command `idempotency`: commands that make, check and clean up the tables."""
