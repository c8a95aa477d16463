"""HTTP: health, metrics, the admin API and the console, beside the wires and over the same broker (decision 0054)."""
