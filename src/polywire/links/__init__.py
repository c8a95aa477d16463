"""Links: topics of other brokers that a broker follows."""
