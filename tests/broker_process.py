"""The broker in its own process, under the name that tests use. It is a fork, which starts quickly (``fork_server``)."""

from __future__ import annotations

from typing import Final, Self

from polywire.testing import SLOT_MIB
from polywire.testing.process import LOGIN_WIRES, SOURCE, WIRES, child_environment, silenced
from polywire.testing.process import BrokerProcess as StartedBroker
from tests import fork_server

__all__ = ["LOGIN_WIRES", "SOURCE", "WIRES", "BrokerProcess", "StartedBroker", "child_environment", "silenced"]

SLOT_VARIABLE: Final = "POLYWIRE_SERVE_SLOT_MIB"


class BrokerProcess(StartedBroker):
    """A broker that is a fork of a process that has imported it.

    Its journal files are the smallest, unless an option gives their size. With the default size, a start writes 128 MiB.
    """

    _popen = staticmethod(fork_server.popen)

    def start(self) -> Self:
        self._environment.setdefault(SLOT_VARIABLE, str(SLOT_MIB))
        return super().start()
