"""This library beside what else one would use: `python -m suite`, or `make bench`."""
