"""The server process: configuration, listeners, connections, start and stop."""
