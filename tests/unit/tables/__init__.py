"""Tests of topics as tables."""
