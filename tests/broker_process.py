"""The broker in its own process, under the name that tests use."""

from __future__ import annotations

from polywire.testing.process import LOGIN_WIRES, SOURCE, WIRES, BrokerProcess, child_environment, silenced

__all__ = ["LOGIN_WIRES", "SOURCE", "WIRES", "BrokerProcess", "child_environment", "silenced"]
