"""The simulation of a broker, with clients that outlive its processes and record every response (decision 0122)."""
