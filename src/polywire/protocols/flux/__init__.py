"""The FLUX text protocol (V1 lines), conformance levels A, B and C."""
