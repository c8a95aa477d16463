"""The simulation of a log: callers that make any request at any time, and checks of the stored data (decision 0122)."""
