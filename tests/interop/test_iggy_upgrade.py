"""Upgrade the SDKs of one Iggy topic, client by client, with the programs of docs/migrate/iggy-upgrade.md.

The SDKs are those of ``test_iggy_sdks.py`` that PyPI has.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple
from urllib.request import urlopen

import pytest

from tests import fork_server
from tests.broker_process import child_environment
from tests.e2e.followed_page import matches, read_page
from tests.interop.test_iggy_sdks import lines_of, started
from tests.three_brokers import Brokers, one_or_three, through

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "migrate" / "iggy-upgrade.md"
OLDEST: Final = "iggy-py-0.4.0"  # it has no groups
# The SDKs with groups, and the dialect of each.
SDKS: Final = {
    "apache-iggy-0.5.0": "0.7",
    "apache-iggy-0.6.0": "0.8",
    "apache-iggy-0.7.0": "0.10",
    "apache-iggy-0.8.0": "0.10",
    "apache-iggy-0.9.0": "vsr",
    "apache-iggy-0.9.1.dev5": "vsr-0.12",
}
NEWEST: Final = "apache-iggy-0.9.1.dev5"
FROM_ONE: Final = (OLDEST, "apache-iggy-0.5.0")  # SDKs that count ids from 1
WITH_HEADERS: Final = ("apache-iggy-0.9.0", NEWEST)
PARTITIONS: Final = 3
BATCH: Final = 10  # of billing.py
BUFFERED: Final = {NEWEST: 16 * BATCH}  # records that an SDK receives ahead; others receive one batch
AT_ONCE: Final = 60  # orders that a producer sends before the next one starts
ABORTED: Final = -signal.SIGABRT  # some SDKs abort the interpreter on exit, after everything succeeded
SECONDS_MAX: Final = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for the programs of the page."""
    path = tmp_path / "programs"
    path.mkdir()
    return path


def environment_of(sdk: str) -> dict[str, str]:
    return started(sdk, ("", 0))[1]


def save_programs(folder: Path, broker: Brokers) -> None:
    """Save the programs of the page with the broker's address; a copy of the producer uses iggy-py."""
    address = "{}:{}".format(*broker.addresses["iggy"])
    for name, text in read_page(PAGE.read_text("utf-8")).files.items():
        text = text.replace("127.0.0.1:8090", address)
        (folder / name).write_text(text, "utf-8")
        older = text.replace("import apache_iggy", "import iggy_py").replace(
            'version("apache-iggy").startswith("0.5.")', "True"
        )
        (folder / f"older-{name}").write_text(older, "utf-8")


def commands() -> list[tuple[list[str], str]]:
    """Return the words of the page's commands, and the output that it shows after each."""
    block = re.compile(r"^```\n(polywire .*?)\n```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
    return [(command.split(), expected or "") for command, expected in block.findall(PAGE.read_text("utf-8"))]


def run_command(broker: Brokers, words: list[str]) -> str:
    """Run a command of the page against this broker, and return its output."""
    done = fork_server.run(
        [sys.executable, "-m", "polywire", *words[1:]],
        env=child_environment() | {"POLYWIRE_ADDRESS": broker.url()},
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr
    printed: str = done.stdout
    return printed


def wait_until(condition: Callable[[], object], broker: Brokers) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < end, broker.log_text()
        time.sleep(0.02)


class Member:
    """A process that runs billing.py.

    Attributes:
        seen: (offset, order) of each line that it has printed.
        others: lines that are not orders, also a part of a line that was printed when the member was killed.
        highest: the highest offset that any member had printed for each partition when this one started.
    """

    def __init__(self, sdk: str, folder: Path, highest: dict[int, int]) -> None:
        self.sdk: Final = sdk
        self.highest: Final = dict(highest)
        self.seen: Final[list[tuple[int, int]]] = []
        self.others: Final[list[str]] = []
        self._process: Final = subprocess.Popen(
            [sys.executable, "billing.py"], cwd=folder, env=environment_of(sdk), stdout=subprocess.PIPE, text=True
        )
        self._reader: Final = threading.Thread(target=self._read, args=(highest,))
        self._reader.start()

    def _read(self, highest: dict[int, int]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                printed = re.fullmatch(r"(\d+) order (\d+)\n", line)
                if printed is None:
                    self.others.append(line)
                    continue
                offset, number = map(int, printed.groups())
                self.seen.append((offset, number))
                partition = number % PARTITIONS
                highest[partition] = max(highest.get(partition, -1), offset)

    def end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        code = self._process.wait(SECONDS_MAX)
        self._reader.join(SECONDS_MAX)
        assert code in (0, ABORTED, -number), f"{self.sdk} {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def runs(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each partition with offsets that follow each other, in the order of reading."""
        for partition in range(PARTITIONS):
            run: list[int] = []
            for offset, number in self.seen:
                if number % PARTITIONS != partition:
                    continue
                if run and offset != run[-1] + 1:
                    yield partition, run
                    run = []
                run.append(offset)
            if run:
                yield partition, run


class Orders(threading.Thread):
    """Runs orders.py with one SDK after the other, without a pause.

    Attributes:
        sdk: of the next process; None to end.
        count: orders that were acknowledged.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.sdk: str | None = OLDEST
        self.used: Final[list[str]] = []
        self.count = 0
        self._folder: Final = folder
        self.errors: Final[list[str]] = []

    def run(self) -> None:
        while (sdk := self.sdk) is not None:
            name = "older-orders.py" if sdk == OLDEST else "orders.py"
            done = subprocess.run(
                [sys.executable, name, str(self.count), str(AT_ONCE)],
                cwd=self._folder,
                env=environment_of(sdk),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode not in (0, ABORTED) or "Error" in done.stderr:
                self.errors.append(f"{sdk}: {done.stderr}")
                return
            self.count += AT_ONCE
            self.used.append(sdk)


class Change(NamedTuple):
    """A member joined or left: the highest offset of each partition before and after, and how much members buffered."""

    before: dict[int, int]
    after: dict[int, int]
    buffered: int

    def may_repeat(self, partition: int, offset: int) -> bool:
        """Return whether a member may have received the record, and not stored its offset, when the partition moved."""
        least, most = (highest.get(partition, -1) for highest in (self.before, self.after))
        return least - self.buffered < offset <= most + self.buffered


class Clients:
    """The producer and the two members of the group.

    Attributes:
        changes: of the members.
    """

    def __init__(self, folder: Path, broker: Brokers) -> None:
        self.orders: Final = Orders(folder)
        self.highest: Final[dict[int, int]] = {}
        self.ended: Final[list[Member]] = []
        self.changes: Final[list[Change]] = []
        self._folder: Final = folder
        self._broker: Final = broker
        self._members: Final = [self._member(next(iter(SDKS))) for _ in range(2)]
        self.orders.start()

    @property
    def members(self) -> list[Member]:
        """All members, those that ended first."""
        return [*self.ended, *self._members]

    def _member(self, sdk: str) -> Member:
        return Member(sdk, self._folder, self.highest)

    def use_in_producer(self, sdk: str) -> None:
        """Let the next producer use this SDK, and wait until it has written."""
        self.wait_until(lambda: self.orders.used)
        self.orders.sdk = sdk
        self.wait_until(lambda: sdk in self.orders.used)

    def replace_members(self, sdk: str, ending: signal.Signals) -> None:
        """Start a member with this SDK, end one of the former, and do the same with the other."""
        if not self.changes:
            self._note_change({}, sdk)
        for place, old in enumerate(self._members):
            before = dict(self.highest)
            new = self._member(sdk)
            self.wait_until(lambda new=new: new.seen)  # type: ignore[misc]
            self._note_change(before, sdk)
            assert {SDKS[old.sdk], SDKS[sdk]} <= _dialects(self._broker)
            before = dict(self.highest)
            old.end(ending)
            self.wait_until(lambda: self._joined() == len(self._members))
            self._note_change(before, sdk)
            self.ended.append(old)
            self._members[place] = new

    def _joined(self) -> int:
        """Return how many members have partitions, as the page's command shows."""
        words = commands()[1][0]
        rows = run_command(self._broker, words).splitlines()[1:]
        return len({row.split()[-2] for row in rows})

    def _note_change(self, before: dict[int, int], sdk: str) -> None:
        self.changes.append(Change(before, dict(self.highest), BUFFERED.get(sdk, BATCH)))

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: condition() or self.orders.errors, self._broker)
        assert not self.orders.errors

    def finish(self) -> None:
        """End the producer, and wait until the members have read everything."""
        self.orders.sdk = None
        self.orders.join(SECONDS_MAX)
        last = self.orders.count // PARTITIONS - 1
        self.wait_until(lambda: all(self.highest.get(partition) == last for partition in range(PARTITIONS)))

    def kill(self) -> None:
        self.orders.sdk = None
        for member in self.members:
            member.kill()
        self.orders.join(SECONDS_MAX)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ending"),
    [((), signal.SIGTERM), (("--processes", "2"), signal.SIGKILL)],
    ids=["one process", "two processes, members are killed"],
)
def test_each_client_is_upgraded_while_records_flow(
    folder: Path, tmp_path: Path, options: tuple[str, ...], ending: signal.Signals
) -> None:
    """Two members are replaced by those of the next SDK, version by version, and so is the producer."""
    for sdk in (OLDEST, *SDKS):
        environment_of(sdk)
    options = () if through() else options
    (create, _), (describe, described) = commands()
    with one_or_three(tmp_path, *options, wires=["iggy", "polywire", "http"]) as broker:
        save_programs(folder, broker)
        run_command(broker, create)
        clients = Clients(folder, broker)
        try:
            for former, sdk in pairwise(SDKS):
                clients.use_in_producer(former)
                clients.replace_members(sdk, ending)
            clients.use_in_producer(NEWEST)
            clients.finish()
            wait_until(lambda: matches(run_command(broker, describe), described), broker)
            positions = [line.split()[2:4] for line in run_command(broker, describe).splitlines()[1:]]
        finally:
            clients.kill()
    count = clients.orders.count
    assert positions == [[str(count // PARTITIONS)] * 2] * PARTITIONS
    assert list(dict.fromkeys(clients.orders.used)) == [OLDEST, *SDKS]
    check(clients, count)


def _dialects(broker: Brokers) -> set[str]:
    """Return the dialects that the page's endpoint reports."""
    host, port = broker.addresses["http"]
    with urlopen(f"http://{host}:{port}/api/v1/connections", timeout=SECONDS_MAX) as response:
        return {
            connection["dialect"] for connection in json.load(response)["connections"] if connection["wire"] == "iggy"
        }


def check(clients: Clients, count: int) -> None:
    """Check the rules of the page: which records repeat, their order, and where members start.

    Nothing is lost. A record repeats only if its partition moved while a member had received it and not stored its
    offset.
    """
    members = clients.members
    assert not [(member.sdk, line) for member in members for line in member.others if line[-1] == "\n"]
    delivered = Counter(number for member in members for _, number in member.seen)
    assert sorted(delivered) == list(range(count))
    assert all(offset == number // PARTITIONS for member in members for offset, number in member.seen)
    repeated = [(number % PARTITIONS, number // PARTITIONS) for number, times in delivered.items() if times > 1]
    assert not [record for record in repeated if not any(change.may_repeat(*record) for change in clients.changes)]
    furthest = max(BUFFERED.values())
    for member in members:
        runs = list(member.runs())
        assert len(runs) <= PARTITIONS * (len(clients.changes) + 1), f"{member.sdk} read out of order"
        for partition, run in runs:
            assert run[0] > member.highest.get(partition, -1) - furthest, f"{member.sdk} ignored the stored offset"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with one_or_three(tmp_path_factory.mktemp("iggy"), wires=["iggy", "polywire"]) as broker:
        yield broker


def test_messages_are_the_same_for_every_sdk(served: Brokers) -> None:
    """All read the same ids, times and offsets; ids of streams and topics start at 1 in old versions."""
    stream = "identical"
    run(served, OLDEST, "create", stream)
    for sdk in (OLDEST, *SDKS):
        run(served, sdk, "send_one", stream)
    found = {sdk: run(served, sdk, "look", stream)[0] for sdk in (OLDEST, *SDKS)}
    numbers = {sdk: (found[sdk].pop("stream id"), found[sdk].pop("topic id")) for sdk in found}
    headers = {sdk: found[sdk].pop("headers") for sdk in found}
    assert all(look == found[NEWEST] for look in found.values())
    number, topic = numbers[NEWEST]
    assert isinstance(number, int)
    assert topic == 0
    assert numbers == {sdk: (number + 1, 1) if sdk in FROM_ONE else (number, 0) for sdk in numbers}
    seen_by_new_sdks = [sdk in WITH_HEADERS for sdk in (OLDEST, *SDKS)]
    assert headers == {sdk: seen_by_new_sdks if sdk in WITH_HEADERS else [] for sdk in found}


def test_consumers_without_a_group_continue_by_their_id(served: Brokers) -> None:
    """The simple poll is consumer 1 up to 0.5.0, then 0, and an argument since 0.9.0; each id has its own offset."""
    stream = "alone"
    run(served, OLDEST, "create", stream)
    for _ in range(8):
        run(served, OLDEST, "send_one", stream)

    def offset(sdk: str, *, consumer: int | None = None, start: int | None = None) -> object:
        return run(served, sdk, "poll_one", stream, IGGY_CONSUMER=consumer, IGGY_START=start)[0]["offset"]

    assert [offset(OLDEST), offset("apache-iggy-0.5.0")] == [0, 1]
    assert offset("apache-iggy-0.6.0") == 0, "as consumer 0"
    assert offset("apache-iggy-0.6.0", start=2) == 2, "its stored offset, too, moves to that of consumer 1"
    assert [offset("apache-iggy-0.7.0"), offset("apache-iggy-0.8.0")] == [3, 4]
    assert [offset("apache-iggy-0.9.0", consumer=0), offset(NEWEST, consumer=0)] == [5, 6]
    assert offset("apache-iggy-0.9.0", consumer=1) == 2, "where 0.5.0 was"


def run(broker: Brokers, sdk: str, action: str, stream: str, **variables: int | None) -> list[dict[str, object]]:
    words, environment = started(sdk, broker.addresses["iggy"])
    environment |= {name: str(value) for name, value in variables.items() if value is not None}
    return lines_of(broker, [*words, action, stream], environment)
