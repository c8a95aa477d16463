"""Values from a fixed set of names."""

from __future__ import annotations

import pytest

from polywire.choices import NAMES_SHOWN, check_options, choice, did_you_mean, listed, missing
from polywire.errors import ErrorCode, Invalid
from polywire.types import KeyHash, Level


@pytest.mark.parametrize("given", [Level.SYNCED, "synced", "SYNCED", "Synced"])
def test_a_member_or_its_name(given: Level | str) -> None:
    assert choice(Level, given, "level") is Level.SYNCED


def test_the_name_of_a_member_is_its_text_value() -> None:
    assert choice(KeyHash, "murmur3", "key hash") is KeyHash.MURMUR3


@pytest.mark.parametrize("given", ["all", "sync", "", 2, None])
def test_an_unknown_name_is_refused_with_the_valid_ones(given: str) -> None:
    with pytest.raises(Invalid, match="known=memory,stored,synced,written") as refused:
        choice(Level, given, "level")
    assert refused.value.message.startswith("no such level")


def test_long_lists_are_shortened() -> None:
    names = [f"topic-{number:04}" for number in range(5_000)]
    error = missing(ErrorCode.TOPIC_MISSING, "topic", "topic-00-10", names)
    assert "did you mean 'topic-00" in error.message
    assert error.message.endswith(f",topic-{NAMES_SHOWN - 1:04},… (5000 in all)")
    assert len(listed("x" * 500 + str(number) for number in range(500))) < 2_000


def test_without_a_close_match_there_is_no_suggestion() -> None:
    assert did_you_mean("orders", ["billing"]) == ""
    assert listed([]) == "none"


def test_options() -> None:
    check_options("producer", ["level"], ["level", "create"])
    with pytest.raises(
        TypeError, match=r"unknown option of a producer, did you mean 'level'[?] option='levl' known=create,level"
    ):
        check_options("producer", ["levl"], ["level", "create"])
