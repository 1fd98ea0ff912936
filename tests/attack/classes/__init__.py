"""One file for each class of attacks: `SHORT`, its cases in `make test` (four times as many in `make test-nightly`), and `attack(folder)`, which gives `case(draw)`.

A case draws something hostile and holds the answer against an oracle. What may be refused stands in `with refused():`;
what is wrong raises `WrongError`, what was acknowledged and is gone `LostError`. Everything else that leaves a case is
uncaught. A case may return how many inputs it tried.
"""
