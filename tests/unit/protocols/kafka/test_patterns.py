"""Patterns that match topic names (spec: kafka#patterns)."""

from __future__ import annotations

import re
from contextlib import suppress
from time import thread_time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polywire.protocols.kafka.patterns import Pattern, PatternError

NAMES = (
    "",
    "a",
    "b",
    "ab",
    "ba",
    "aab",
    "abab",
    "a.b",
    "a-b",
    "A",
    "orders",
    "orders.eu",
    "orders-1",
    "x_9",
    "[",
    "a\nb",
    "é",
)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "a|b", ".*", "a*", "a+b", "a?b", "^a", "^a$", "a$|b", "(a|b)*", "(?:ab)+", "(ab)?", "(?P<name>a)b*"),
        *(
            "orders.*",
            r"orders\..+",
            "^orders-[0-9]+$",
            "[ab]+",
            "[^a]",
            "[^a-c]*",
            r"[\w.]+",
            r"\d",
            r"\D+",
            r"\w+\W\w+",
        ),
        *("a{2}b", "a{1,2}b", "a{0,3}b?", "a{2,}b", "(ab){2}", "(a|b){2,3}", "a{0}", "(a{1,2}){2}b", "a{x}"),
        *(r"a\.b", r"\[", "[]a]", "[a-]+", "[-a]+", "a*?b", "(a*)*", "(a|)b", "()a"),
        *("(?i)a", "(?i)ORDERS.*", "(?i)[a-c]+", "^^a$$", "a^b", r"\Aa\Z", ".", "a.b", "(a|ab)(b|)", "(^a|b$)+"),
    ],
)
def test_patterns_match_the_same_names_as_re2(text: str) -> None:
    expected = [name for name in NAMES if re.fullmatch(text, name, re.ASCII)]
    assert [name for name in NAMES if Pattern(text).matches(name)] == expected


def test_syntax_that_other_libraries_spell_differently() -> None:
    assert Pattern(r"\Qa.b\E+").matches("a.b")
    assert not Pattern(r"\Qa.b\E").matches("axb")
    assert Pattern(r"a\z").matches("a")
    assert Pattern("(?<name>a)b").matches("ab")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "(",
            ")",
            "a)",
            "(a",
            "[",
            "[a",
            "[b-a]",
            "*",
            "+a",
            "a|*",
            "(?=a)",
            "(?!a)",
            "(?<=a)b",
            "(?#c)",
            r"\1",
            r"(a)\1",
        ),
        *(
            "\\",
            r"\p{L}",
            r"\b",
            "[[:alpha:]]",
            "a{2,1}",
            "a{1001}",
            "(?P<a",
            "(?P<1>a)",
            "(?P=a)",
            "(" * 60 + ")" * 60,
        ),
        *("a" * 2_001, "(((a{100}){100}){100})", "[a-\\", "[\\"),
    ],
)
def test_invalid_patterns_are_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Pattern(text)


LETTERS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", "^", "$", "(a)", "(?:b|ab)"])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,1}", "{1,}"])
TEXTS = st.recursive(
    st.lists(st.tuples(LETTERS, REPEATS).map("".join), max_size=4).map("".join),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
    max_leaves=5,
)


@settings(deadline=None, max_examples=300)
@given(text=TEXTS, names=st.lists(st.text("abc", max_size=6), max_size=8))
def test_generated_patterns_match_like_re(text: str, names: list[str]) -> None:
    try:
        expected = re.compile(text)
    except re.error:  # RE2 also repeats the anchors of a text
        assume(False)
    pattern = Pattern(text)
    assert [pattern.matches(name) for name in names] == [expected.fullmatch(name) is not None for name in names]


@settings(deadline=None, max_examples=300)
@given(st.text("ab(){}[]|*+?^$\\.,-0123Q:<>P=!", max_size=40))
def test_any_text_is_a_pattern_or_an_error(text: str) -> None:
    with suppress(PatternError):
        Pattern(text).matches("abab")


@pytest.mark.parametrize(
    "text", ["(a*)*b", "(a|a)*b", "(a|aa)+b", "(a{0,30}){0,30}b", "(a|b)*a(a|b){14}c", "(.*a){20}b"]
)
def test_no_pattern_takes_exponential_time(text: str) -> None:
    pattern = Pattern(text)
    started = thread_time()
    with suppress(PatternError):
        for size in range(100, 255, 10):
            assert not pattern.matches("ab" * size + "c")
    assert thread_time() - started < 2, "16 names"


def test_many_names_cost_one_lookup_per_character() -> None:
    pattern = Pattern("^(orders|payments)-[a-z]+-[0-9]+$")
    names = [f"orders-{word}-{number}" for word in ("eu", "us") for number in range(5_000)]
    started = thread_time()
    assert all(map(pattern.matches, names))
    assert thread_time() - started < 2
