"""Brokers of two versions in one cluster: a rolling upgrade under load with faults, and the way back.

``python -m tests.histories.upgrades --from COMMIT --faults 5``. Three brokers of an earlier commit share a bucket, and clients
work all the time. The brokers are upgraded one by one. Before the first upgrade and after each one, leaders are killed, stopped
and raced, as in ``takeovers``, so that brokers of both versions lead in turn. Then they are downgraded one by one in the same
way. The checkers judge the whole history.

The earlier version is taken from git, and is not compiled. Its clients are those of this version.
"""

from __future__ import annotations

import asyncio
import io
import random
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from compileall import compile_dir
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.broker_process import SOURCE, StartedBroker
from tests.histories.clients import read_everything
from tests.histories.history import History
from tests.histories.repeat import Histories, parser_of, repeat
from tests.histories.run import COPY, GROUP, ONCE, PARTITIONS, TOPIC, create, everybody, working
from tests.histories.takeovers import CALM_S, Cluster, Nemesis, bucket_in
from tests.ledger import ROOT, Command
from tests.s3_server import bucket_kind

PAUSE_S: Final = 0.2  # between two requests of a client


class VersionedBroker(StartedBroker):
    """A broker whose source tree can be changed before a start."""

    source = SOURCE

    def start(self) -> VersionedBroker:
        """Start a broker of ``source``."""
        self._environment["PYTHONPATH"] = str(self.source)
        super().start()
        return self


def tree_of(commit: str, folder: Path) -> Path:
    """Write the sources of a commit to a folder, and return the directory to import from.

    Raises SystemExit if git does not have the commit, as in a shallow clone.
    """
    made = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        raise SystemExit(f"git has no sources of this commit (fetch the whole history) commit={commit!r}")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as files:
        files.extractall(folder, filter="data")
    compile_dir(folder / "src", quiet=1)  # otherwise each start would do it
    return folder / "src"


def run(folder: Path, *, commit: str, seed: int, faults: int) -> History:
    """Make a history in which every broker is upgraded and downgraded. ``faults`` is their number for each mix."""
    chance, old = random.Random(seed), tree_of(commit, folder / "old")
    with bucket_in(folder) as (url, _), ExitStack() as running:
        cluster = Cluster(folder, url, (), chance, have_clocks=False, kind=VersionedBroker)
        for broker in cluster.brokers:
            _set_source(broker, old)
            running.enter_context(broker)
        history = asyncio.run(_run(cluster, chance, old, faults))
        for broker in (*cluster.others(), cluster.leader()):
            assert broker.stop() == 0, broker.log_text()[-4000:]
    return history


def _set_source(broker: StartedBroker, source: Path) -> None:
    assert isinstance(broker, VersionedBroker)
    broker.source = source


async def _run(cluster: Cluster, chance: random.Random, old: Path, faults: int) -> History:
    history = History()
    topics = dict.fromkeys((TOPIC, ONCE, COPY), PARTITIONS)
    await create(topics, lambda wire: cluster.leader().url(wire))
    nemesis = Nemesis(cluster, None, history, chance)
    async with working(everybody(cluster.url, history, PAUSE_S)):
        await _disturb(cluster, nemesis, chance, faults)
        for source in (SOURCE, old):
            for broker in chance.sample(cluster.brokers, len(cluster.brokers)):
                assert await asyncio.to_thread(broker.stop) == 0, broker.log_text()[-4000:]
                _set_source(broker, source)
                await cluster.restart(broker)
                await _disturb(cluster, nemesis, chance, faults)
    await read_everything(cluster.url("polywire"), topics, {GROUP: TOPIC, COPY: TOPIC}, history)
    return history


async def _disturb(cluster: Cluster, nemesis: Nemesis, chance: random.Random, faults: int) -> None:
    for _ in range(faults):
        await asyncio.sleep(cluster.scaled(chance.uniform(*CALM_S)))
        await nemesis.act()


def main(words: Sequence[str] | None = None) -> int:
    """Make and judge a history."""
    parser = parser_of("tests.histories.upgrades", __doc__)
    parser.add_argument("--from", dest="commit", required=True, help="commit of the earlier version")
    parser.add_argument("--faults", type=int, default=5, help="for each mix of versions")
    given = parser.parse_args(words)
    histories = Histories(
        Command(f"tests.histories.upgrades --from {given.commit} --faults {given.faults}", bucket_kind()),
        lambda folder, seed, _: run(folder, commit=given.commit, seed=seed, faults=given.faults),
    )
    return repeat(histories, seed=given.seed, is_enough=bool, is_recorded=given.ledger)


if __name__ == "__main__":
    sys.exit(main())
