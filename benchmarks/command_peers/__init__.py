"""Commands beside the peers: rates, round trips, log, and what is done twice when a worker is killed."""
