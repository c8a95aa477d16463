"""The log in the simulation: callers that make any request at any time, and checks of what it stores (decision 0122)."""
