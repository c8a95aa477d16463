"""The log in the simulated world: callers that ask for anything at any time, and what it must have kept (decision 0122)."""
