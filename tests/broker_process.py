"""The broker in a process of its own, under the name by which the tests have it."""

from __future__ import annotations

from polywire.testing.process import LOGIN_WIRES, SOURCE, WIRES, BrokerProcess, child_environment, silenced

__all__ = ["LOGIN_WIRES", "SOURCE", "WIRES", "BrokerProcess", "child_environment", "silenced"]
