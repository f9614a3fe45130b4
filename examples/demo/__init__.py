"""`make demo`: real flights, delivered twice and by killed processes, to the same code with and without markers."""
