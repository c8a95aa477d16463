"""Tests of the published protocol documents, statement by statement."""
