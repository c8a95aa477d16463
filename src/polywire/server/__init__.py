"""The process: configuration, listeners, connections, start and stop."""
