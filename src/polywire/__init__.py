"""Polywire: one durable streaming log that speaks many wires."""
