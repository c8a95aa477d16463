"""The activity of a broker process over the last hour, for charts: a ring of rates in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from polywire.broker.broker import Broker
from polywire.clock import Clock
from polywire.http.encoding import Slices
from polywire.http.process import Sample, Traffic
from polywire.http.session import WIRE

INTERVAL_S: Final = 10  # seconds of one sample
SAMPLES_MAX: Final = 360  # samples of the activity that a process remembers, one every ten seconds
_US: Final = 1_000_000


class Totals(msgspec.Struct, frozen=True):
    """Sums over all partitions.

    Attributes:
        records: records stored since the topics were created.
    """

    partitions: int
    records: int
    stored_bytes: int


async def totals(broker: Broker, slices: Slices) -> Totals:
    """Return sums over all partitions, pausing for other tasks."""
    partitions = records = stored = 0
    for topic in broker.topics():
        for partition in list(topic.partitions):
            partitions += 1
            records += partition.log.next_offset
            stored += partition.log.stored_bytes
        if slices.is_over:
            await slices.rest()
    return Totals(partitions, records, stored)


class History:
    """Samples of the last hour of one process, the oldest first."""

    def __init__(
        self, broker: Broker, traffic: Callable[[], Mapping[str, Traffic]], clock: Clock | None = None
    ) -> None:
        """If ``clock`` is None, the broker's clock is used."""
        self._broker: Final = broker
        self._clock: Final = clock or broker.clock
        self._traffic: Final = traffic
        self._samples: Final[deque[Sample]] = deque(maxlen=SAMPLES_MAX)
        self._at_us = 0
        self._counters = (0, 0, 0)  # records, bytes received and sent at the last sample

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples, the oldest first."""
        return list(self._samples)

    async def sweep(self) -> None:
        """Add a sample if an interval has passed since the last one."""
        now_us = self._clock.now_us()
        number = now_us // (INTERVAL_S * _US)
        if self._at_us and number == self._at_us // (INTERVAL_S * _US):
            return
        found = await totals(self._broker, Slices())
        moved = [traffic for wire, traffic in self._traffic().items() if wire != WIRE]
        counters = (found.records, sum(one.received_bytes for one in moved), sum(one.sent_bytes for one in moved))
        seconds = (now_us - self._at_us) / _US
        if self._at_us and seconds > 0:
            # the number of records falls when a topic is deleted
            rates = [max(0.0, (now - before) / seconds) for now, before in zip(counters, self._counters, strict=True)]
            while self._samples and self._samples[-1].number >= number:  # the clock was set back
                self._samples.pop()
            self._samples.append(Sample(number, *(round(rate, 2) for rate in rates)))
        self._at_us, self._counters = now_us, counters
