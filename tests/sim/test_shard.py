"""Brokers that lead a shard in turn lose nothing; without any one of the fencing rules they do."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Final

import pytest

from polywire.cluster import fencing, garbage_collection
from polywire.log.journal.group import read_group
from tests.sim.shard import SEED, Broken, Shard

RUNS: Final = 100
RUNS_WITHOUT: Final = 60  # in which the loss shows without a rule
FOUND: Final = (2_001_640,)
"""Runs that once failed, because of the fencing or of the checks."""
WITHOUT: Final = {
    "I1 numbers are used one at a time": (
        "        yield Pause(pause)\n        pause = min(2 * pause, PAUSE_MAX_S)\n\n\ndef read_journal",
        "        number += 1\n\n\ndef read_journal",
    ),
    "I2 the bytes of a number never change": (
        "        outcome = yield Create(number, content)\n",
        "        outcome = yield Create(number, content)\n        content = content[: _group_bytes(content)]\n",
    ),
    "I3 what a name that exists holds is read": ("found == content)", "True)"),
    "I3 a foreign object ends a leader": ("return bool(found == content)", "number += 1\n                continue"),
    "I4 nothing counts before it is settled": (
        "if outcome is Outcome.DONE:\n            return",
        "if outcome is not Outcome.EXISTS:\n            return",
    ),
    "I5 who claims has read all below": (
        "        return None\n    floor, _",
        "        number += 1\n        if not (yield from settle(number, content)):\n            return None\n    floor, _",
    ),
    "I6 the floor is read behind a claim": (
        "if floor.number > number:\n        return None\n    return Claim",
        "return Claim",
    ),
    "I8 starts stay": (" if number not in starts]", "]"),
    "I8 the floor moves before anything goes": (
        "        outcome = yield MoveFloor(floor, tag)\n",
        "        yield Delete(range(seen.number, floor.number))\n        outcome = yield MoveFloor(floor, tag)\n",
    ),
    "R the floor is read behind the journal": ("if after.number != floor.number:", "if False:"),
}
SWEPT_WITHOUT: Final = {
    "starts stay": (" and start_of(head, seed) == 0", ""),
    "what is above the floor stays": (" if number < floor.number)", ")"),
    "what a group names stays": (" and name not in needed", ""),
    "what may yet be named stays": ("name < end and ", ""),
    "what was named stays for a grace": ("yield Pause(grace_s)", "yield Pause(0)"),
}


def test_nothing_acknowledged_is_lost() -> None:
    takeovers = 0
    for number in range(RUNS):
        shard = Shard(number)
        shard.run()
        takeovers += shard.takeovers
        assert shard.acknowledged, "a run without a leader shows nothing"
    assert takeovers > 5 * RUNS


@pytest.mark.parametrize("number", FOUND)
def test_a_run_that_once_failed_passes(number: int) -> None:
    Shard(number).run()


@pytest.mark.parametrize("rule", WITHOUT)
def test_without_a_rule_acknowledged_data_is_lost(rule: str) -> None:
    rules = changed(fencing, *WITHOUT[rule])
    rules.__dict__["_group_bytes"] = group_bytes
    rules.__dict__.update(
        (name, kind) for name, kind in vars(fencing).items() if isinstance(kind, type)
    )  # requests are shared
    assert any(breaks(Shard(number, rules)) for number in range(RUNS_WITHOUT))


@pytest.mark.parametrize("rule", SWEPT_WITHOUT)
def test_sweeping_without_a_rule_loses_something(rule: str) -> None:
    swept = changed(garbage_collection, *SWEPT_WITHOUT[rule])
    assert any(breaks(Shard(number, swept=swept)) for number in range(RUNS_WITHOUT))


def changed(module: ModuleType, old: str, new: str) -> ModuleType:
    """Return a copy of a module with one rule removed."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, "a rule is in one place"
    rules = ModuleType("rules")
    rules.__dict__.update(module.__dict__)
    exec(compile(source.replace(old, new), "rules", "exec"), rules.__dict__)
    return rules


def group_bytes(content: bytes) -> int:
    """Return the bytes of the first group of an object."""
    fields = read_group(content, 0, SEED)
    assert fields is not None, "a leader created it"
    return fields.length


def breaks(shard: Shard) -> bool:
    try:
        shard.run()
    except Broken:
        return True
    return False
