"""Names on every protocol: spelling round-trips, and contains no character that the protocol's syntax uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polywire import names
from polywire.broker.permissions import parse_grants, resource_name, split_resource_name
from polywire.errors import Invalid
from polywire.protocols.cursus import messages as cursus
from polywire.protocols.flux import messages as flux
from polywire.protocols.kafka07 import messages as kafka07
from polywire.types import NAME_BYTES_MAX, TopicName, check_topic_name, is_name

ODD = [
    *" %:/|,@=*?[]'\"\\.._-",
    "%2",
    "%20",
    "%zz",
    "%C3",
    "%c3%bc",
    "ü",
    "日",
    "😀",
    "\xa0",
    "\u3000",
    "\ufffd",
    "\ue000",
    "message=",
]
pieces = st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8"), st.sampled_from("ab2F"))
texts = st.lists(pieces, min_size=1, max_size=20).map("".join)
parts = texts.filter(is_name)


def flux_holds(word: str) -> bool:
    data = word.encode()
    return flux.words(data) == [data] and not set(data) & set(b"|[]\r\n")


def cursus_holds(word: str) -> bool:
    data = f"topic={word} group=g message=m".encode()
    request = cursus.read_text(b"JOIN_GROUP " + data, None)
    assert isinstance(request, cursus.Request)
    return (
        request.words == (f"topic={word}", "group=g")
        and request.message == b"m"
        and "," not in word
        and not request.pattern
    )


def kafka07_holds(word: str) -> bool:
    return not any(char == "/" or ord(char) > 0xFFEF or 0xD800 <= ord(char) <= 0xF8FF for char in word)


Wire = tuple[Callable[[str], str], Callable[[str], str], Callable[[str], bool]]
WIRES: dict[str, Wire] = {
    "flux": (flux.topic_word, lambda word: flux.topic_name(word.encode()), flux_holds),
    "cursus": (cursus.topic_word, cursus.topic_name, cursus_holds),
    "kafka07": (
        lambda name: kafka07.topic_bytes(name).decode(),
        lambda word: kafka07.topic_name(word.encode()),
        kafka07_holds,
    ),
}


@pytest.mark.parametrize("wire", WIRES)
@given(parts)
@example("my stream:50%25 ü")
@example("%")
@example("a message=b")
@example("message=")
@example("%%20")
@example("% 20")
def test_spelled_names_round_trip(wire: str, name: str) -> None:
    spell, read, holds = WIRES[wire]
    word = spell(name)
    assert read(word) == name
    assert spell(read(word)) == word
    assert holds(word)


@given(st.text(alphabet=st.sampled_from("%2046aCc3\n\xff😀 "), max_size=12))
def test_a_read_name_has_no_control_characters_or_is_refused(text: str) -> None:
    try:
        name = names.unescape(text)
    except Invalid:
        return
    name.encode()
    assert name == text or names.CONTROLS.isdisjoint(name)
    assert names.unescape(names.escape(name)) == name


@pytest.mark.parametrize("name", ["a", "a-b.c_d=e", "ü", "a b", "%", "100%", "%zz", "日本"])
def test_a_name_without_reserved_characters_is_spelled_unchanged(name: str) -> None:
    assert names.escape(name) == name == names.unescape(name)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("a", True),
        ("my stream: 50 % für jeden", True),
        ("n" * NAME_BYTES_MAX, True),
        ("ü" * 127 + "n", True),
        ("😀", True),
        ("", False),
        (".", False),
        ("..", False),
        ("...", True),
        ("n" * 256, False),
        ("ü" * 128, False),
        ("a\nb", False),
        ("a\0", False),
        ("\x7f", False),
        ("\x85", False),
        ("\x9b", False),
        ("\u2028", False),
        ("\u2029", False),
        ("\udc80", False),
    ],
)
def test_valid_names(name: str, *, good: bool) -> None:
    assert is_name(name) is good


def test_both_parts_of_a_full_name_have_separate_limits() -> None:
    check_topic_name(TopicName("s" * 255, "t" * 255))
    for stream, topic in (("s" * 256, "t"), ("s", "t" * 256)):
        with pytest.raises(Invalid):
            check_topic_name(TopicName(stream, topic))


@given(parts, parts)
@example("a/b", "c")
@example("a", "b/c")
@example("a%2Fb", "c")
def test_a_grant_names_one_stream_and_topic(stream: str, topic: str) -> None:
    assert split_resource_name(resource_name(stream, topic)) == (stream, topic)


@given(parts, parts)
def test_a_permission_word_can_name_every_topic(stream: str, topic: str) -> None:
    reserved = frozenset("/@, \t") | names.WHITE
    word = f"consume@{names.escape(stream, reserved)}/{names.escape(topic, reserved)}"
    assert list(parse_grants([word]).topics) == [resource_name(stream, topic)]
