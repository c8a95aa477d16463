"""The Kafka protocol, as current clients use it."""
