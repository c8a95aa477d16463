"""The protocols that the broker speaks, one package each."""
