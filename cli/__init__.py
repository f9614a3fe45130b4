"""The command `idempotency`: a demo on real data, a check of the tables, and the cleanup that cron runs."""
