"""Parsing of client-supplied characters, numbers and patterns in time bounded by their length."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.matching import DIGITS, consists_of, matches, signed_64
from tests.processor import processor_used


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("", "", True),
        ("", "a", False),
        ("*", "", True),
        ("?", "", False),
        ("a*", "a", True),
        ("a*b", "acb", True),
        ("a*b", "acbc", False),
        ("a?c*", "abc", True),
        ("*.[ab]", "x.[ab]", True),
        ("*.[ab]", "x.a", False),
        ("**?", "", False),
        ("**?", "\n", True),
    ],
)
def test_patterns(pattern: str, text: str, expected: bool) -> None:
    assert matches(pattern, text) is expected


@given(st.text("ab*?", max_size=8), st.text("ab*?", max_size=12))
def test_patterns_match_like_a_shell(pattern: str, text: str) -> None:
    assert matches(pattern, text) is fnmatch.fnmatchcase(text, pattern)


def test_a_pattern_that_could_backtrack_exponentially_is_fast() -> None:
    with processor_used() as used:
        assert not matches("*a" * 60 + "b", "a" * 249)
    assert used.seconds < 0.5


@given(st.text("+-0123456789 _x٣", max_size=24))
def test_numbers_are_ascii_and_have_64_bits(text: str) -> None:
    digits = text.removeprefix("-") if text.startswith("-") else text.removeprefix("+")
    expected = int(text) if digits and set(digits) <= set(DIGITS) else None
    assert signed_64(text) == (expected if expected is not None and -(2**63) <= expected < 2**63 else None)


def test_the_limits_of_numbers() -> None:
    assert signed_64(str(2**63 - 1)) == 2**63 - 1
    assert signed_64(str(-(2**63))) == -(2**63)
    assert signed_64(str(2**63)) is None
    with processor_used() as used:
        assert signed_64("0" * 1_000_000 + "x") is None
        assert signed_64("9" * 1_000_000) is None
    assert used.seconds < 0.5


def test_characters() -> None:
    assert consists_of("", DIGITS)
    assert consists_of("12", DIGITS)
    assert not consists_of("1a2", DIGITS)
