"""`make cluster`: servers that replicate, on this machine; faults under load; totals that come from the input."""
