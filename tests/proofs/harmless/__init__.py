"""Random programs of handlers, run alone and by the library: is code that is right without the library right with it?

`make harmless` draws programs of locks, savepoints, insert-or-update and ledgers, and prints each one that is right in
a plain session, and wrong or refused when the library runs it.
"""
