"""``python -m tests.sim.mutate``: switch off one mechanism after the other and count the runs until a simulation fails.

``python -m tests.sim.mutate broker producer-epochs`` tries the mechanisms of one world and one more; other results stay.
The results go to benchmarks/results/reliability-2026-11.md. The exit code is 1 if the simulation no longer detects a
mechanism that it once detected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import structlog

from tests.sim.broker_mutations import BROKER_MUTATIONS
from tests.sim.classic_mutations import CLASSIC_MUTATIONS
from tests.sim.mutation import Mutation
from tests.sim.mutations import LOG_MUTATIONS
from tests.sim.promises import BROKEN, Violation
from tests.sim.queue_mutations import QUEUE_MUTATIONS, SHARE_MEMBER_MUTATIONS
from tests.sim.readiness_mutations import READINESS_MUTATIONS
from tests.sim.shards_mutations import SHARDS_MUTATIONS
from tests.sim.tables_mutations import TABLES_MUTATIONS
from tests.sim.takeovers_mutations import TAKEOVERS_MUTATIONS
from tests.sim.wires_mutations import WIRES_MUTATIONS
from tests.sim.worlds import WORLDS

MUTATIONS: Final = (
    *LOG_MUTATIONS,
    *BROKER_MUTATIONS,
    *QUEUE_MUTATIONS,
    *WIRES_MUTATIONS,
    *CLASSIC_MUTATIONS,
    *READINESS_MUTATIONS,
    *SHARDS_MUTATIONS,
    *TABLES_MUTATIONS,
    *TAKEOVERS_MUTATIONS,
    *SHARE_MEMBER_MUTATIONS,
)
RUNS: Final = 100
PAGE: Final = Path(__file__).parents[2] / "benchmarks/results/reliability-2026-11.md"
BEGIN: Final = "<!-- made by `make sim-mutations` -->"
END: Final = "<!-- end -->"
UNNOTICED: Final = "not noticed"


class Noticed(NamedTuple):
    """The first run that fails, or a test, and the violated promise."""

    by: str
    said: str


def notice(mutation: Mutation, runs: int = RUNS, likely: Sequence[int] = ()) -> Noticed | None:
    """Return the test that fails without this mechanism, or the first of ``runs`` that breaks a promise.

    ``likely``: seeds to try first.
    """
    with pytest.MonkeyPatch.context() as patch:
        mutation.take_out(patch)
        if mutation.test is not None:
            try:
                mutation.test()
            except (*BROKEN, pytest.fail.Exception):
                return Noticed(
                    f"`{mutation.test.__module__.removeprefix('tests.sim.')}`",
                    mutation.test.__name__.removeprefix("test_").replace("_", " "),
                )
        seeds = (seed for seed in count(mutation.first) if seed % 16 in mutation.rests)
        for seed in chain(likely, islice(seeds, runs)):
            try:
                WORLDS[mutation.world](seed).run()
            except Violation as violation:
                return Noticed(str(seed), violation.promise)
            except BROKEN as error:
                return Noticed(str(seed), f"{type(error).__name__} in the {mutation.world}")
    return None


def recorded() -> dict[str, Noticed | None]:
    """Return the results in the page, by the name of the switch."""
    found: dict[str, Noticed | None] = {}
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    for line in table.strip().splitlines()[2:]:
        _, name, _, by, said = [cell.strip() for cell in line.strip("|").split("|")]
        found[name.strip("`")] = None if by == UNNOTICED else Noticed(by, said)
    return found


def main() -> int:
    """Try all of them and write the table."""
    structlog.configure(processors=[_drop])
    before, worse, chosen = recorded(), 0, sys.argv[1:]
    lines = ["| world | switch | what is taken out | noticed by run, or test | which says |", "|---|---|---|---|---|"]
    for mutation in MUTATIONS:
        is_tried = not chosen or mutation.name in chosen or mutation.world in chosen
        found = notice(mutation) if is_tried else before.get(mutation.name)
        worse += found is None and before.get(mutation.name) is not None
        by, said = (UNNOTICED, mutation.reason) if found is None else found
        lines.append(f"| {mutation.world} | `{mutation.name}` | {mutation.mechanism} | {by} | {said} |")
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text("\n".join([head + BEGIN, *lines, END + rest.partition(END)[2]]))
    return int(worse > 0)


def _drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent


if __name__ == "__main__":
    sys.exit(main())
