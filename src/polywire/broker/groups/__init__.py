"""Consumer groups: members, generations, assignments, positions."""
