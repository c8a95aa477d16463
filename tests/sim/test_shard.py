"""Brokers that lead a shard in turn lose nothing; and with any one of the protocol's rules taken out they do, and it is noticed."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Final

import pytest

from polywire.cluster import protocol
from tests.sim.shard import Broken, Shard

RUNS: Final = 100
RUNS_WITHOUT: Final = 3_000  # the rarest is found within some hundreds
WITHOUT: Final = {
    "what a name that exists holds is read": ("found == content)", "True)"),
    "a foreign object ends a leader": ("return bool(found == content)", "number += 1\n                continue"),
    "starts stay": (" if number not in starts]", "]"),
    "the floor is read behind a claim": (
        "if floor.number > number:\n        return None\n    return Claim",
        "return Claim",
    ),
    "the floor is read behind the journal": ("if after.number != floor.number:", "if False:"),
    "who claims has read all below": (
        "        return None\n    floor, _",
        "        number += 1\n        if not (yield from settle(number, content)):\n            return None\n    floor, _",
    ),
    "the floor moves before anything goes": (
        "        outcome = yield MoveFloor(floor, tag)\n",
        "        yield Delete(range(seen.number, floor.number))\n        outcome = yield MoveFloor(floor, tag)\n",
    ),
}


def test_nothing_acknowledged_is_lost() -> None:
    takeovers = 0
    for number in range(RUNS):
        shard = Shard(number)
        shard.run()
        takeovers += shard.takeovers
        assert shard.acknowledged, "a run in which nobody leads shows nothing"
    assert takeovers > 5 * RUNS


@pytest.mark.parametrize("rule", WITHOUT)
def test_without_a_rule_it_is(rule: str) -> None:
    old, new = WITHOUT[rule]
    source = inspect.getsource(protocol)
    assert source.count(old) == 1, "a rule is one place"
    rules = ModuleType("rules")
    rules.__dict__.update(protocol.__dict__)
    exec(compile(source.replace(old, new), "rules", "exec"), rules.__dict__)
    rules.__dict__.update(
        (name, kind) for name, kind in vars(protocol).items() if isinstance(kind, type)
    )  # requests are shared
    assert any(breaks(number, rules) for number in range(RUNS_WITHOUT))


def breaks(number: int, rules: ModuleType) -> bool:
    try:
        Shard(number, rules).run()
    except Broken:
        return True
    return False
