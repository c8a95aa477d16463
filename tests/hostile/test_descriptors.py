"""A process may open only so many files: idle connections never use up the log's."""

from __future__ import annotations

from array import array
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import ERROR
from polywire.protocols.polywire.messages import Verb
from polywire.records.batch import from_spans
from polywire.server.resources import CONNECTIONS_MIN, PER_BLOB, share
from tests.broker_process import BrokerProcess
from tests.crash.test_hostile_peers import RawPeer
from tests.hostile.peers import connect

SLOT_MIB = 17
BATCHES = 80  # of a MB: four slots


def hold_connections(broker: BrokerProcess, held: ExitStack, count: int) -> None:
    """Open silent connections; some may be refused."""
    for _ in range(count):
        with suppress(OSError):
            held.enter_context(connect(broker, "flux"))


@pytest.mark.parametrize("limit", [64, 256])
def test_idle_connections_do_not_take_the_descriptors_of_the_log(tmp_path: Path, limit: int) -> None:
    options = ("--slot-mib", str(SLOT_MIB))
    spans = array("q", [word for at in range(1000) for word in (0, -1, at * 1000, 1000)])
    batch = bytes(from_spans(bytes(1_000_000), memoryview(spans)))
    with (
        BrokerProcess(tmp_path / "data", *options, wires=("flux", "polywire"), descriptors=limit) as broker,
        RawPeer(broker) as polite,
        ExitStack() as held,
    ):
        for _ in range(BATCHES):
            hold_connections(broker, held, limit // 30)
            assert not polite.ask(Verb.PRODUCE, messages.Produce("large", 0, create=True), batch).flags & ERROR
        assert list((tmp_path / "data" / "segments").iterdir()), "slots were sealed"
        assert broker.stop() == 0, broker.log_text()


def test_too_few_descriptors_are_refused_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="limit of open files is too low"),
        BrokerProcess(tmp_path / "data", descriptors=48),
    ):
        pass


@pytest.mark.parametrize("limit", [64, 256, 1024, 20_000, 1 << 20])
def test_descriptors_are_divided(limit: int) -> None:
    shares = share(limit, slots=4)
    assert shares.connections >= CONNECTIONS_MIN
    assert shares.connections + PER_BLOB * shares.blobs < limit - 40
