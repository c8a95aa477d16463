"""The same work on Polywire and on other brokers, in one run: ``python -m benchmarks.peers``."""
