"""Clients for every wire."""
