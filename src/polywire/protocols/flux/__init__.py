"""The FLUX protocol, whose requests and responses are lines of text.

All of its specification's conformance levels (A, B and C) are implemented.
"""
