"""The command `idempotency`: a demo on real data, and commands that make, check and clean up the tables."""
