"""Tests of the activity of the last hour."""

from __future__ import annotations

from polywire.clock import SystemClock
from polywire.http import history
from polywire.http.encoding import Slices
from polywire.http.history import INTERVAL_S, History
from polywire.http.merging import MERGES
from polywire.http.process import Traffic
from polywire.types import TopicName
from tests.unit.http.site import Site
from tests.unit.http.test_api import get, store

SECOND_US = 1_000_000


class ManualClock(SystemClock):
    """A clock that a test moves."""

    def __init__(self, now_us: int) -> None:
        self.us = now_us

    def now_us(self) -> int:
        return self.us

    def advance(self, us: int) -> None:
        self.us += us


def test_rates_are_sampled_every_interval(site: Site) -> None:
    moved = {"kafka": Traffic(1, 1, 0, 0), "http": Traffic(1, 1, 0, 0)}
    clock = ManualClock(1_700_000_000 * SECOND_US)
    made = History(site.broker, lambda: moved, clock)

    def sweep() -> None:
        site.loop.run_until_complete(made.sweep())

    sweep()
    assert made.samples == []
    store(site, "t", [b"v"] * 50)
    moved["kafka"], moved["http"] = Traffic(1, 1, 1_000, 4_000), Traffic(1, 1, 9_999, 9_999)
    clock.advance(3 * SECOND_US)
    sweep()
    assert made.samples == [], "an interval has not passed"
    clock.advance((INTERVAL_S - 3) * SECOND_US)
    sweep()
    [sample] = made.samples
    assert (sample.number, sample.records, sample.received_bytes, sample.sent_bytes) == (170_000_001, 5.0, 100.0, 400.0)
    site.broker.delete_topic(site.broker.topic("t"))
    clock.advance(INTERVAL_S * SECOND_US)
    sweep()
    assert made.samples[-1].records == 0.0, "a deleted topic is no negative rate"
    for _ in range(history.SAMPLES_MAX + 5):
        clock.advance(INTERVAL_S * SECOND_US)
        sweep()
    assert len(made.samples) == history.SAMPLES_MAX
    clock.advance(-20 * INTERVAL_S * SECOND_US)
    for _ in range(2):
        clock.advance(INTERVAL_S * SECOND_US)
        sweep()
    numbers = [sample.number for sample in made.samples]
    assert numbers == sorted(set(numbers)), "the clock was set back"
    for _ in range(20):
        clock.advance(INTERVAL_S * SECOND_US)
        sweep()
    site.process.samples = made.samples
    found = get(site, "/history").json
    assert found["interval_s"] == INTERVAL_S
    assert len(found["samples"]) == history.SAMPLES_MAX


def test_many_partitions_are_summed_in_slices(site: Site) -> None:
    site.broker.create_topic(TopicName.parse("t"), 3)
    found = site.loop.run_until_complete(history.totals(site.broker, Slices()))
    assert (found.partitions, found.records) == (3, 0)


def test_samples_of_several_processes_are_added() -> None:
    def sample(number: int, records: float) -> dict[str, float]:
        return {"number": number, "records": records, "received_bytes": 1.0, "sent_bytes": 2.0}

    merged = MERGES["history"](
        [
            {"interval_s": 10, "samples": [sample(1, 5.0), sample(2, 7.0)]},
            {"interval_s": 10, "samples": [sample(2, 1.0)]},
        ]
    )
    assert merged["samples"] == [
        sample(1, 5.0),
        {"number": 2, "records": 8.0, "received_bytes": 2.0, "sent_bytes": 4.0},
    ]
