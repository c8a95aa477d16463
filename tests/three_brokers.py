"""Three brokers on one bucket that act as one broker: a leader, two standbys, and one that clients connect to.

``POLYWIRE_THROUGH=standby-2`` makes the behaviour suite and the real clients connect to the second standby; ``make
three-brokers`` tries each. The bucket is versitygw if ``POLYWIRE_S3_SERVER`` names it, otherwise a directory.
``POLYWIRE_THROUGH=4-processes`` makes them connect to four processes of one directory instead; ``make processes`` tries
two and four.

``stop`` and ``kill`` apply to the leader, so that another takes over, and ``start`` returns when there is a leader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

import pytest

from polywire.client import bulk
from tests.broker_process import BrokerProcess
from tests.s3_server import BUCKET, S3Server, s3_binary

VARIABLE: Final = "POLYWIRE_THROUGH"
PLACES: Final = ("leader", "standby-1", "standby-2")
PROCESSES: Final = {"2-processes": 2, "4-processes": 4}  # of one directory, instead of three brokers
EAGER: Final = "tests.eager_broker"  # brokers that upload without delay
PREFIX: Final = "log"
ASKED: Final = "polywire"  # the protocol that checks whether there is a leader
LED: Final = "leading the shard"
LED_S: Final = 60.0  # in which there is a leader again; it takes about three


def through() -> str | None:
    """Return which broker clients connect to, or how many processes there are; None for one broker with a directory."""
    place = os.environ.get(VARIABLE)
    if place and place not in (*PLACES, *PROCESSES):
        raise pytest.UsageError(f"{VARIABLE} is one of {', '.join((*PLACES, *PROCESSES))}, not {place!r}")
    return place or None


@contextmanager
def one_or_three(
    folder: Path, *options: str, wires: Sequence[str] | None = None, place: str | None = None
) -> Iterator[BrokerProcess | ThreeBrokers]:
    """Start one broker, or three with clients at this position, or the environment's; they must end cleanly."""
    place = place or through()
    if place in PROCESSES:
        options, place = ("--processes", str(PROCESSES[place]), *options), None
    if place is None:
        with BrokerProcess(folder / "data", *options, wires=wires) as process:
            yield process
            assert process.stopped or process.stop() == 0, process.log_text()
        return
    with ThreeBrokers(folder / "three", place, *options, wires=wires) as brokers:
        yield brokers
        assert brokers.stop_all() == 0, brokers.log_text()


class ThreeBrokers:
    """Replaces a ``BrokerProcess`` in scenarios. Guards: after ``start`` all three run, and one of them leads."""

    def __init__(self, folder: Path, place: str, *options: str, wires: Sequence[str] | None = None) -> None:
        """place: the broker that clients connect to, whichever leads. options, wires: as of a ``BrokerProcess``."""
        folder.mkdir(parents=True)
        self._bucket: Final = _Bucket(folder)
        options = ("--bucket", self._bucket.url, "--cache-gib", "0", "--balance-s", "0", *options)
        if wires is not None and ASKED not in wires:
            wires = (*wires, ASKED)
        self._brokers: Final = [
            BrokerProcess(folder / name, *options, "--node", name, wires=wires, module=EAGER) for name in PLACES
        ]
        self._through: Final = self._brokers[PLACES.index(place)]
        self._ended: BrokerProcess | None = None
        self._led = 0

    @property
    def data_dir(self) -> Path:
        """The directory of the log's files in the bucket, like that of a single broker."""
        return self._bucket.directory / "shards" / "0000"

    @property
    def addresses(self) -> Mapping[str, tuple[str, int]]:
        """The addresses for clients."""
        return self._through.addresses

    @property
    def memory_bytes(self) -> int:
        """The memory of all three."""
        return sum(broker.memory_bytes for broker in self._brokers if not broker.stopped)

    def url(self, wire: str = "polywire") -> str:
        """Return the URL for ``polywire.connect``."""
        return self._through.url(wire)

    def log_text(self) -> str:
        """Return the logs of all."""
        return "\n".join(broker.log_text() for broker in self._brokers)

    def start(self) -> ThreeBrokers:
        """Start ended brokers; at first all, the leader first.

        Returns when there is a new leader that can be reached.
        """
        with self._bucket.found():
            first, *others = self._brokers if self._ended is None else [self._ended]
            first.start()
            with ThreadPoolExecutor() as pool:
                list(pool.map(BrokerProcess.start, others))
        self._ended = None
        end = time.monotonic() + LED_S
        while (led := len(self._lines())) <= self._led:
            assert time.monotonic() < end, f"no leader\n{self.log_text()}"
            time.sleep(0.02)
        self._led = led
        # A new leader does not listen yet, and standbys may not have noticed it.
        bulk.connect(self.url(ASKED), reconnect_s=LED_S).ping()
        return self

    def stop(self) -> int:
        """Stop the leader with SIGTERM; return the exit code."""
        return self._end().stop()

    def kill(self) -> None:
        """Kill the leader with SIGKILL."""
        self._end().kill()

    def stop_all(self) -> int:
        """Stop all with SIGTERM, the leader last; return the largest exit code."""
        leader = self._leader()
        return max([broker.stop() for broker in (*(one for one in self._brokers if one is not leader), leader)])

    def _end(self) -> BrokerProcess:
        self._led = len(self._lines())
        self._ended = self._leader()
        return self._ended

    def _leader(self) -> BrokerProcess:
        """Return the broker that started to lead last."""
        return max(self._lines(), key=lambda found: found[0])[1]

    def _lines(self) -> list[tuple[int, BrokerProcess]]:
        """Yield the starts of leaders, and their brokers."""
        return [
            (int(line.rpartition("start=")[2].split()[0]), broker)
            for broker in self._brokers
            for line in broker.log_text().splitlines()
            if LED in line
        ]

    def __enter__(self) -> ThreeBrokers:
        try:
            return self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for broker in self._brokers:
            broker.__exit__(kind, error, trace)
        self._bucket.end()


class _Bucket:
    """A bucket for three brokers: a separate server, or a directory."""

    def __init__(self, folder: Path) -> None:
        binary = s3_binary()
        self._server: S3Server | None = None
        if binary is None:
            self.directory = folder / "bucket"
            self.url = f"file://{self.directory}"
            return
        self._server = S3Server(binary, folder / "s3")
        self._server.start()
        self.directory = folder / "s3" / BUCKET / PREFIX
        self.url = f"s3://{BUCKET}/{PREFIX}"

    @contextmanager
    def found(self) -> Iterator[None]:
        """Let brokers started inside the block find it."""
        with pytest.MonkeyPatch.context() as context:
            for name, value in ({} if self._server is None else self._server.environment).items():
                context.setenv(name, value)
            yield

    def end(self) -> None:
        """Stop its server, if it has one."""
        if self._server is not None:
            self._server.kill()


Brokers = BrokerProcess | ThreeBrokers
