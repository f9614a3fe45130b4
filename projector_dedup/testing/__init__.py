"""The kit that our users test with: databases, and the contract that every database must keep."""
