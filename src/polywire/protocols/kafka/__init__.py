"""The wire of Apache Kafka as it is spoken today."""
