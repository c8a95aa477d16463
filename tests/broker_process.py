"""The broker in its own process, under the name that tests use. It is a fork, which starts quickly (``fork_server``)."""

from __future__ import annotations

from polywire.testing.process import LOGIN_WIRES, SOURCE, WIRES, child_environment, silenced
from polywire.testing.process import BrokerProcess as StartedBroker
from tests import fork_server

__all__ = ["LOGIN_WIRES", "SOURCE", "WIRES", "BrokerProcess", "StartedBroker", "child_environment", "silenced"]


class BrokerProcess(StartedBroker):
    """A broker that is a fork of a process that has imported it."""

    _popen = staticmethod(fork_server.popen)
