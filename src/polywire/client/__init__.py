"""Clients for every protocol."""
