"""``polywire bench`` over every protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from polywire.cli.main import run
from polywire.testing.process import WIRES
from polywire.testing.thread import BrokerThread

PERCENTILES = ["latency_p50", "latency_p90", "latency_p99", "latency_p99.9", "latency_max"]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as started:
        yield started


@pytest.mark.parametrize("wire", WIRES)
def test_every_protocol_can_be_measured(wire: str, broker: BrokerThread, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--records", "500", "--size", "10"]
    for words in (["produce", "--batch", "50", *few], ["consume", *few], ["latency", "--rate", "50", "--seconds", "1"]):
        assert run(["bench", *words, "--address", broker.url(wire), "-o", "json"]) == 0
        results = json.loads(capsys.readouterr().out)
        figures = results["figures"]
        assert figures["records"]["value"] == (50 if words[0] == "latency" else 500)
        assert results["settings"]["measurement"] == words[0]
        assert results["settings"]["address"] == broker.url(wire)
        assert results["machine"].keys() == {"system", "machine", "processors", "python", "client"}
        if words[0] != "consume":
            times = [figures[name]["value"] for name in PERCENTILES]
            assert times == sorted(times)
            assert all(time > 0 for time in times)
        if words[0] != "latency":
            assert figures["rate"]["value"] > 0 < figures["client_processor_time"]["value"]


def test_the_topic_of_a_measurement_is_deleted(broker: BrokerThread, capsys: pytest.CaptureFixture[str]) -> None:
    def topics() -> list[str]:
        capsys.readouterr()
        assert run(["topic", "list", "--address", broker.url(), "-o", "json"]) == 0
        return [row["topic"] for row in json.loads(capsys.readouterr().out)]

    before = topics()
    assert run(["bench", "produce", "--records", "10", "--address", broker.url()]) == 0
    assert topics() == before
    assert run(["bench", "produce", "--records", "0", "--address", broker.url()]) == 2


def test_passwords_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "produce", "--address", "polywire://ann:secret@127.0.0.1:1"]) == 1
    captured = capsys.readouterr()
    assert "connection refused" in captured.err
    assert "secret" not in captured.out + captured.err
