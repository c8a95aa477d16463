"""The Kafka 0.7 protocol."""
