"""The FLUX text wire (V1 lines), conformance levels A, B and C."""
