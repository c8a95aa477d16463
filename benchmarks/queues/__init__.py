"""Work queues of Polywire and of other brokers, in one run: ``python -m benchmarks.queues``."""
