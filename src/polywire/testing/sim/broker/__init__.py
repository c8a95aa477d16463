"""The broker in the simulated world: clients that outlive its processes, and everything they were told (decision 0122)."""
