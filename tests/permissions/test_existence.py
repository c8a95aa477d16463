"""Unauthorized clients cannot learn what exists: a response is the same whether or not the named resource exists."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.permissions.cases import Case, Player, cases
from tests.permissions.forms import forms
from tests.permissions.players import play

CASES = [*cases(), *forms()]
RANDOM: Final = re.compile(
    rb"""(?<=\x17)[\w-]{22}       # the id of a Kafka cluster
    | (?<=\xc4\x10).{16}        # the id of a topic, in MessagePack
    | (?<=member=m-)\d{4}       # the suffix that Cursus gives a member
    | [0-9a-f]{64}              # an access token
    | (?<="created_at_us":)\d+""",
    re.VERBOSE | re.DOTALL,
)
"""Random parts of responses of two equal brokers."""
TOKENS: Final = {("polywire", "PUBLISH"), ("polywire", "ABANDON")}
"""Staged batches are named by 128 random bits that only their client knows: a refusal reveals nothing."""


@pytest.mark.parametrize("player", [Player.NO_CALLER, Player.OTHER])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if (case.wire, case.command) not in TOKENS],
    ids=lambda case: f"{case.wire}-{case.command}-{case.action.word}",
)
def test_a_response_does_not_depend_on_hidden_resources(case: Case, player: Player) -> None:
    hidden, hidden_answer = play(case, player)
    missing, missing_answer = play(case, player, has_tenant=False)
    assert RANDOM.sub(b"", hidden_answer) == RANDOM.sub(b"", missing_answer)
    assert hidden is missing
