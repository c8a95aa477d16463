"""The same work on Polywire and on the brokers people compare it with, in one run: ``python -m benchmarks.peers``."""
