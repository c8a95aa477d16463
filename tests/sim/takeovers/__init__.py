"""Simulation of a broker over a bucket, which several machines lead in turn."""
