"""HTTP: health checks, metrics, the admin API and the console (decision 0121)."""
