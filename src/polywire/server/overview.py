"""Collect the statistics of the process that the admin API shows.

They cover connections, traffic by protocol, listeners, settings, and job times of the log's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from polywire.durations import Durations
from polywire.http.process import BucketView, ConnectionView, Sample, Traffic
from polywire.log.base import Completion, Loop
from polywire.log.worker import ThreadWorker
from polywire.server.config import ServeConfig
from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.table_orders import TableReport

if TYPE_CHECKING:
    from polywire.http.history import History
    from polywire.server.bucket_watch import BucketWatch
    from polywire.server.links import Links
    from polywire.server.queries import Queries
    from polywire.server.tables import Tables

_Result = TypeVar("_Result")


class WorkTimes:
    """Creates the log's threads, and records how long their jobs take, by the name of the thread."""

    def __init__(self) -> None:
        self.by_name: Final[dict[str, Durations]] = {}

    def make_worker(self, name: str, loop: Loop) -> TimedWorker:
        return TimedWorker(name, loop, self.by_name.setdefault(name, Durations()))


class TimedWorker(ThreadWorker):
    """A thread that records how long each job takes."""

    def __init__(self, name: str, loop: Loop, durations: Durations) -> None:
        super().__init__(name, loop)
        self._durations: Final = durations

    def run(self, job: Callable[[], _Result], completed: Completion[_Result]) -> None:
        def timed() -> _Result:
            begun = perf_counter()
            try:
                return job()
            finally:
                self._durations.observe(perf_counter() - begun)

        super().run(timed, completed)


class Overview:
    """Statistics of the process for HTTP. Implements ``http.process.Process``."""

    def __init__(
        self, hub: Hub, config: ServeConfig, work: Mapping[str, Durations], watch: BucketWatch | None = None
    ) -> None:
        self.hub: Final = hub
        self._watch: Final = watch
        self._config: Final = config
        self._work: Final = work
        self.addresses: dict[str, str] = {}
        self.written: Tables | None = None
        self.queries: Queries | None = None
        self.links: Links | None = None
        self.sampled: History | None = None

    @property
    def stopping(self) -> bool:
        return self.hub.draining

    @property
    def refused(self) -> int:
        return self.hub.refused_before + self.hub.refused

    @property
    def connections_max(self) -> int:
        return self.hub.limits.connections_max

    @property
    def receive_buffer_bytes(self) -> int:
        return sum(connection.held_bytes for connection in self.hub.connections)

    def connections(self) -> Iterable[ConnectionView]:
        hub = self.hub
        for connection in list(hub.connections):
            if isinstance(connection, Connection):
                yield ConnectionView(
                    wire=connection.wire,
                    dialect=connection.dialect,
                    peer=connection.peer,
                    user=hub.logins.name_of(connection),
                    received_bytes=connection.received_bytes,
                    sent_bytes=connection.sent_bytes,
                )

    def traffic(self) -> Mapping[str, Traffic]:
        hub = self.hub
        sums = {wire: [0, hub.closed[wire], received, sent] for wire, (received, sent) in hub.moved.items()}
        for connection in hub.connections:
            found = sums.setdefault(connection.wire, [0, 0, 0, 0])
            found[0] += 1
            found[1] += 1
            found[2] += connection.received_bytes
            found[3] += connection.sent_bytes
        return {wire: Traffic(*numbers) for wire, numbers in sums.items()}

    def work(self) -> Mapping[str, Durations]:
        """Return the durations of the log threads' jobs, by name of the thread."""
        return self._work

    def requests(self) -> Mapping[tuple[str, str], Durations]:
        return self.hub.request_times.by_kind

    def bucket(self) -> BucketView | None:
        return None if self._watch is None else self._watch.view()

    def history(self) -> Sequence[Sample]:
        return () if self.sampled is None else self.sampled.samples

    def tables(self) -> Mapping[str, TableReport]:
        return {} if self.written is None else self.written.reports()

    def listeners(self) -> Mapping[str, str]:
        return self.addresses

    def settings(self) -> Sequence[tuple[str, object]]:
        return [(field.name, _plain(getattr(self._config, field.name))) for field in fields(self._config)]


def _plain(value: Any) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
