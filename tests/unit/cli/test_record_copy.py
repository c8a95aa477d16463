"""``polywire record copy`` as it is typed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.cli.main import run
from polywire.cli.record_copy import place_of
from polywire.client.copying import End
from polywire.errors import Invalid
from polywire.testing.thread import BrokerThread


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire", "iggy"]) as running:
        monkeypatch.setenv("POLYWIRE_ADDRESS", running.url())
        yield running


@pytest.fixture
def orders(broker: BrokerThread, tmp_path: Path) -> str:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number}\n" for number in range(9)))
    with lines.open() as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", stream)
        assert run(["record", "produce", "orders", "--format", "raw", "--key", "k"]) == 0
    return "orders"


def test_a_topic_is_copied_and_what_it_loses_is_told(
    broker: BrokerThread, orders: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    state = tmp_path / "state"
    assert run(["group", "reset", "billing", orders, "--to", "4"]) == 0
    capfdbinary.readouterr()
    words = ["record", "copy", orders, f"{broker.url('iggy')}/copied", "--state", str(state), "--group", "billing"]
    assert run(words) == 0
    told = capfdbinary.readouterr().err.decode().splitlines()
    assert told[-1] == "copied records=9 lost_keys=9 lost_times=9"
    assert any(line.endswith("position=4 new_position=4") for line in told)
    assert state.exists()
    assert run(words) == 0
    assert capfdbinary.readouterr().err.decode().splitlines()[-1] == "copied records=0"
    assert run(["record", "consume", "copied", "--format", "raw"]) == 0
    assert capfdbinary.readouterr().out == b"".join(b"%d\n" % number for number in range(9))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere", "b"], "code=topic_missing (polywire topic list shows which there are)"),
        (["orders", "polywire://127.0.0.1:1"], "a topic is missing: scheme://host:port/topic"),
        (["orders", "polywire://127.0.0.1:1/b"], "cannot connect: connection refused"),
        (["orders", "orders"], "a topic cannot be copied to itself"),
        (["orders", "b", "--from", "soon"], "--from takes"),
        (["orders", "b", "--from", "latest"], "nothing lies between"),
        (["orders", "b", "-p", "9"], "code=partition_missing"),
        (["orders", "b", "--state", "pyproject.toml"], "not the state of a copy"),
    ],
)
def test_what_cannot_be_copied_is_told(
    words: list[str], reason: str, orders: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["record", "copy", *words]) == 1
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_places() -> None:
    assert place_of("orders", "kafka://h:1") == End("kafka://h:1", "orders")
    assert place_of("iggy+tls://h:1/a/b.c", "") == End("iggy+tls://h:1", "a/b.c")
    assert str(place_of("polywire://me:secret@h:1/orders", "")) == "polywire://h:1/orders"
    with pytest.raises(Invalid):
        place_of("kafka://h:1/", "")
