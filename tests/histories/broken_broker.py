"""``python -m tests.histories.broken_broker``: the command line of a broker that breaks exactly one promise.

The environment variable ``BROKEN`` names the promise. Histories of such brokers show what each checker notices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

import msgspec
import pytest

from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.producers import Producers
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.transactions import Transactions
from polywire.cli.main import run
from polywire.log import opening
from polywire.log.journal.group_writer import GroupWriter
from polywire.log.journal.recovery import Chain
from polywire.types import Level
from tests.sim.mutation import replaced, wrapped

VARIABLE: Final = "BROKEN"
EACH: Final = 25  # of so many requests, one is processed wrongly
_numbers: Final = count(1)


def _forgets_the_last_write(old: Callable[..., Chain | None], *args: Any, **named: Any) -> Chain | None:
    chain = old(*args, **named)
    if chain is None or len(chain.groups) < 2 or chain.groups[-2].sequence < chain.rests_on:
        return chain
    return msgspec.structs.replace(chain, groups=chain.groups[:-1], checksum=chain.groups[-2].checksum)


def _forgets_repetitions(old: Callable[..., Any], *args: Any, **named: Any) -> None:
    old(*args, **named)


def _skips(old: Callable[..., Any], records: Any, partition: Any, offset: int, **named: Any) -> Any:
    is_skipped = next(_numbers) % EACH == 0 and offset + 1 < partition.log.readable_offset
    return old(records, partition, offset + is_skipped, **named)


def _misreports(old: Callable[..., Any], log: Any, *args: Any, done: Any, **named: Any) -> Any:
    is_wrong = next(_numbers) % EACH == 0

    def reported(offset: Any) -> None:
        done(offset + 1 if is_wrong and isinstance(offset, int) else offset)

    return old(log, *args, done=done and reported, **named)


def _commits_all(transactions: Any, transaction: Any, *, level: Level = Level.SYNCED, done: Any, **named: Any) -> Any:
    transactions.commit(transaction, level=level, done=done or (lambda _: None))
    return transaction


def _any_generation(old: Callable[..., Any], coordinator: Any, *args: Any, **named: Any) -> Any:
    group, topic, member, _ = args
    return old(coordinator, group, topic, member, None, **named)


def _any_partition(old: Callable[..., Any], coordinator: Any, *args: Any, **named: Any) -> None:
    old(coordinator, *args[:4], (), **named)


def _all(*switches: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def take_out(patch: pytest.MonkeyPatch) -> None:
        for switch in switches:
            switch(patch)

    return take_out


BREAKS: Final[Mapping[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "acknowledged requests survive a kill": wrapped(opening, "find_chain", _forgets_the_last_write),
    "a repeated batch is stored once": wrapped(Producers, "find", _forgets_repetitions),
    "a reader gets every record": wrapped(RecordVerbs, "fetch", _skips),
    "a record is where the response says": wrapped(GroupWriter, "append", _misreports),
    "aborted records are not readable": replaced(Transactions, "abort", _commits_all),
    "offsets are committed with their records": replaced(Transactions, "_positions", lambda *_: iter(())),
    "a stale member commits nothing": _all(
        wrapped(Coordinator, "_check", _any_generation), wrapped(Coordinator, "check_member", _any_partition)
    ),
}

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        BREAKS[os.environ[VARIABLE]](patch)
        sys.exit(run(sys.argv[1:]))
