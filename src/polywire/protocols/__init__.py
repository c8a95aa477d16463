"""The wires, one package each."""
