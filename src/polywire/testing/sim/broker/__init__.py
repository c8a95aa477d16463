"""The broker in the simulation: clients that outlive its processes, and every answer they got (decision 0122)."""
