"""Small changes of the library that break a promise, and the tests that must notice each: `make mutants`."""
