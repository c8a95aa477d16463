"""The commands of Iggy's protocol page of 2023, field by field, on its own port and on the one that detects protocols.

The tests use the client written from the page alone. The meaning of fields is in ``test_iggy_page_meaning.py``,
contradictions of the page in ``test_iggy_page.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, NamedTuple

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.iggy_page_client import Client, consumer, identifier, message, name, status, strategy, u32
from tests.specs.pages import IGGY, Row

NUMBERS: Final = count(2)  # of streams: each test has its own, and none is the number of its topic
GROUP_ID: Final = 5
NO_SUCH_NAME: Final = (1010, 2011)
MALFORMED: Final = 3


class World:
    """A stream with a topic of two partitions, a message in the first, and a group that the connection has joined."""

    def __init__(self, client: Client, *, is_named: bool = False) -> None:
        number = next(NUMBERS)
        client.ask(202, u32(number) + name(f"s{number}"))
        self.stream = identifier(f"s{number}" if is_named else number)
        client.ask(302, self.stream + u32(1) + u32(2) + u32(0) + name("t"))
        self.topic = identifier("t" if is_named else 1)
        self.at = self.stream + self.topic
        client.ask(602, self.at + u32(GROUP_ID))
        client.ask(604, self.at + u32(GROUP_ID))
        client.ask(101, self.at + b"\2\4" + u32(1) + message(b"m"))
        self.client_id = client.ask(20)[:4]


Fields = Callable[[World], list[bytes]]


class Command(NamedTuple):
    """A command and its lines in the page.

    listed: in the list of codes. section: its code in its own section. stream: its stream field.
    """

    code: int
    listed: int
    section: int | None
    stream: int | None
    fields: Fields


def things(*more: bytes) -> Fields:
    """Encode a stream, a topic, and more."""
    return lambda world: [world.stream, world.topic, *more]


READER: Final = consumer(1, 7)
COMMANDS: Final = {
    "PING": Command(1, 31, None, None, lambda _: []),
    "GET_STATS": Command(10, 33, 671, None, lambda _: []),
    "GET_ME": Command(20, 35, 632, None, lambda _: []),
    "GET_CLIENT": Command(21, 36, 646, None, lambda world: [world.client_id]),
    "GET_CLIENTS": Command(22, 37, 659, None, lambda _: []),
    "POLL_MESSAGES": Command(
        100,
        39,
        390,
        368,
        lambda world: [READER, world.stream, world.topic, u32(1), strategy(1), u32(10), b"\1"],
    ),
    "SEND_MESSAGES": Command(101, 40, 457, 406, things(b"\2\4" + u32(1), message(b"hello", 2**127 + 9))),
    "GET_CONSUMER_OFFSET": Command(120, 42, 481, 475, lambda world: [READER, world.stream, world.topic, u32(1)]),
    "STORE_CONSUMER_OFFSET": Command(
        121, 43, 502, 495, lambda world: [READER, world.stream, world.topic, u32(1), struct.pack("<Q", 0)]
    ),
    "GET_STREAM": Command(200, 45, 196, 192, lambda world: [world.stream]),
    "GET_STREAMS": Command(201, 46, 208, None, lambda _: []),
    "CREATE_STREAM": Command(
        202, 47, 224, None, lambda _: [u32(900_000 + next(NUMBERS)), b"\5", b"n%04d" % next(NUMBERS)]
    ),
    "DELETE_STREAM": Command(203, 48, 241, 237, lambda world: [world.stream]),
    "GET_TOPIC": Command(300, 50, 260, 255, things()),
    "GET_TOPICS": Command(301, 51, 275, 271, lambda world: [world.stream]),
    "CREATE_TOPIC": Command(302, 53, 293, 285, lambda world: [world.stream, u32(2), u32(3), u32(60), b"\3", b"new"]),
    "DELETE_TOPIC": Command(303, 54, 312, 307, things()),
    "CREATE_PARTITIONS": Command(402, 56, 333, 327, things(u32(1))),
    "DELETE_PARTITIONS": Command(403, 57, 351, 345, things(u32(1))),
    "GET_CONSUMER_GROUP": Command(600, 59, 526, 520, things(u32(GROUP_ID))),
    "GET_CONSUMER_GROUPS": Command(601, 60, 543, 538, things()),
    "CREATE_CONSUMER_GROUP": Command(602, 61, 560, 554, things(u32(6))),
    "DELETE_CONSUMER_GROUP": Command(603, 62, 578, 572, things(u32(GROUP_ID))),
    "JOIN_CONSUMER_GROUP": Command(604, 63, 596, 590, things(u32(GROUP_ID))),
    "LEAVE_CONSUMER_GROUP": Command(605, 64, 614, 608, things(u32(GROUP_ID))),
}


@pytest.fixture(params=["iggy", "any"])
def client(request: pytest.FixtureRequest, broker: BrokerProcess) -> Iterator[Client]:
    """Return a client of the protocol's own port, and of the one that detects it."""
    found = Client(broker.addresses[request.param])
    yield found
    found.socket.close()


@IGGY.rows(
    "command",
    *(Row(one.listed, f"the code of {word} is {one.code}", (word,)) for word, one in COMMANDS.items()),
    *(Row(one.section, f"{word} has code {one.code}", (word,)) for word, one in COMMANDS.items() if one.section),
)
def test_a_command_has_its_code(client: Client, command: str) -> None:
    """It is executed under its code, and the same fields are refused under a code that is not on the page."""
    asked = COMMANDS[command]
    world = World(client)
    assert status(client, asked.code + 50_000, *asked.fields(world)) == MALFORMED
    assert status(client, asked.code, *asked.fields(world)) == 0


@IGGY.rows(
    "command",
    Row(205, "GET_STREAMS asks for nothing else", ("GET_STREAMS",)),
    Row(212, "GET_STREAMS carries no bytes", ("GET_STREAMS",)),
    Row(629, "GET_ME asks for nothing else", ("GET_ME",)),
    Row(636, "GET_ME carries no bytes", ("GET_ME",)),
    Row(656, "GET_CLIENTS asks for nothing else", ("GET_CLIENTS",)),
    Row(663, "GET_CLIENTS carries no bytes", ("GET_CLIENTS",)),
    Row(668, "GET_STATS asks for nothing else", ("GET_STATS",)),
    Row(675, "GET_STATS carries no bytes", ("GET_STATS",)),
)
def test_a_command_without_fields_carries_no_payload(client: Client, command: str) -> None:
    code = COMMANDS[command].code
    assert (status(client, code), status(client, code, b"\0")) == (0, MALFORMED)


def places(word: str, line: int, *more: tuple[str, int, int]) -> list[Row]:
    """Return rows of a command whose list of bytes begins, in this line, with a stream and a topic."""
    fields = [("stream", 3, 257), ("topic", 3, 257), *more]
    return [
        Row(line + index, f"{word}: {what} of {size_text(least, most)}", (word, index, least, most))
        for index, (what, least, most) in enumerate(fields)
    ]


def consumer_places(word: str, line: int, *more: tuple[str, int, int]) -> list[Row]:
    """Return those of a command whose list begins with a consumer."""
    fields = [("consumer", 5, 5), ("stream", 3, 257), ("topic", 3, 257), ("partition", 4, 4), *more]
    return [
        Row(line + index, f"{word}: {what} of {size_text(least, most)}", (word, index, least, most))
        for index, (what, least, most) in enumerate(fields)
    ]


def size_text(least: int, most: int) -> str:
    """Return that many bytes."""
    return f"{least} to {most} bytes" if most > least else f"{least} byte{'s' * (least > 1)}"


@IGGY.rows(
    "command, field, least, most",
    Row(200, "GET_STREAM: stream of 3 to 257 bytes", ("GET_STREAM", 0, 3, 257)),
    Row(229, "CREATE_STREAM: the length of the name in 1 byte", ("CREATE_STREAM", 1, 1, 1)),
    Row(230, "CREATE_STREAM: then the name", ("CREATE_STREAM", 2, 1, 255)),
    Row(245, "DELETE_STREAM: stream of 3 to 257 bytes", ("DELETE_STREAM", 0, 3, 257)),
    *places("GET_TOPIC", 264),
    Row(279, "GET_TOPICS: stream of 3 to 257 bytes", ("GET_TOPICS", 0, 3, 257)),
    Row(297, "CREATE_TOPIC: stream of 3 to 257 bytes", ("CREATE_TOPIC", 0, 3, 257)),
    Row(299, "CREATE_TOPIC: the count of partitions in 4 bytes", ("CREATE_TOPIC", 2, 4, 4)),
    Row(300, "CREATE_TOPIC: the length of the name in 1 byte", ("CREATE_TOPIC", 4, 1, 1)),
    Row(301, "CREATE_TOPIC: then the name", ("CREATE_TOPIC", 5, 1, 255)),
    *places("DELETE_TOPIC", 316),
    *places("CREATE_PARTITIONS", 337, ("count", 4, 4)),
    *places("DELETE_PARTITIONS", 355, ("count", 4, 4)),
    *consumer_places("POLL_MESSAGES", 394, ("strategy", 9, 9), ("count", 4, 4), ("whether to commit", 1, 1)),
    *places("SEND_MESSAGES", 461, ("partitioning", 3, 257)),
    *consumer_places("GET_CONSUMER_OFFSET", 485),
    *consumer_places("STORE_CONSUMER_OFFSET", 506, ("offset", 8, 8)),
    *places("GET_CONSUMER_GROUP", 530, ("group", 4, 4)),
    *places("GET_CONSUMER_GROUPS", 547),
    *places("CREATE_CONSUMER_GROUP", 564, ("group", 4, 4)),
    *places("DELETE_CONSUMER_GROUP", 582, ("group", 4, 4)),
    *places("JOIN_CONSUMER_GROUP", 600, ("group", 4, 4)),
    *places("LEAVE_CONSUMER_GROUP", 618, ("group", 4, 4)),
    Row(650, "GET_CLIENT: a client of 4 bytes", ("GET_CLIENT", 0, 4, 4)),
)
def test_a_command_has_this_field(client: Client, command: str, field: int, least: int, most: int) -> None:
    """The complete command is executed, one byte less is refused; identifiers of every length are read as such."""
    asked = COMMANDS[command]
    world = World(client)
    code, fields = asked.code, asked.fields(world)
    before, found, behind = fields[:field], fields[field], fields[field + 1 :]
    assert least <= len(found) <= most
    assert status(client, code, *before, found[:-1], *behind) != 0
    if found in (world.stream, world.topic):
        sizes = [identifier("x" * size) for size in (1, 2, 254, 255)]
        assert {len(sizes[0]), len(sizes[-1])} == {least, most}
        answers = [status(client, code, *before, size, *behind) for size in sizes]
        assert answers == [NO_SUCH_NAME[found == world.topic]] * 4
    assert status(client, code, *fields) == 0


WITHOUT_TOPIC: Final = ("GET_STREAM", "DELETE_STREAM", "GET_TOPICS", "CREATE_TOPIC")


@IGGY.rows(
    "command",
    *(
        Row(one.stream, f"{word} tells the stream by number or name", (word,))
        for word, one in COMMANDS.items()
        if one.stream
    ),
    *(
        Row(one.stream + 1, f"{word} tells the topic by number or name", (word,))
        for word, one in COMMANDS.items()
        if one.stream and word not in WITHOUT_TOPIC
    ),
)
def test_streams_and_topics_are_named_by_number_or_name(client: Client, command: str) -> None:
    asked = COMMANDS[command]
    for is_named in (False, True):
        assert status(client, asked.code, *asked.fields(World(client, is_named=is_named))) == 0


@IGGY.rows(
    "command, other",
    Row(522, "GET_CONSUMER_GROUP tells the group by a number of 32 bits", ("GET_CONSUMER_GROUP", 5000)),
    Row(556, "CREATE_CONSUMER_GROUP tells the group by a number of 32 bits", ("CREATE_CONSUMER_GROUP", 0)),
    Row(574, "DELETE_CONSUMER_GROUP tells the group by a number of 32 bits", ("DELETE_CONSUMER_GROUP", 5000)),
    Row(592, "JOIN_CONSUMER_GROUP tells the group by a number of 32 bits", ("JOIN_CONSUMER_GROUP", 5000)),
    Row(610, "LEAVE_CONSUMER_GROUP tells the group by a number of 32 bits", ("LEAVE_CONSUMER_GROUP", 5000)),
)
def test_groups_are_named_by_numbers(client: Client, command: str, other: int) -> None:
    """A number whose highest byte differs names another group."""
    code = COMMANDS[command].code
    world = World(client)
    assert status(client, code, world.at, u32(GROUP_ID + 2**24)) == other
    assert status(client, code, world.at, u32(GROUP_ID)) == (5001 if command == "CREATE_CONSUMER_GROUP" else 0)


@IGGY.rows(
    "command, answer, highest",
    Row(287, "CREATE_TOPIC makes so many partitions, a number of 32 bits", ("CREATE_TOPIC", 0, 2015)),
    Row(329, "CREATE_PARTITIONS adds so many, a number of 32 bits", ("CREATE_PARTITIONS", 5, 2015)),
    Row(347, "DELETE_PARTITIONS removes so many, a number of 32 bits", ("DELETE_PARTITIONS", 1, 2015)),
)
def test_partitions_are_counted(client: Client, command: str, answer: int, highest: int) -> None:
    code = COMMANDS[command].code
    world = World(client)

    def fields(partitions: int) -> bytes:
        if command == "CREATE_TOPIC":
            return world.stream + u32(2) + u32(partitions) + u32(0) + name("new")
        return world.at + u32(partitions)

    asked = 3 if answer != 1 else 1
    assert status(client, code, fields(2**24 + asked)) == highest
    assert status(client, code, fields(asked)) == 0
    topics = client.ask(301, world.stream)
    first = struct.unpack_from("<IQI", topics)[2]
    if command != "CREATE_TOPIC":
        assert first == answer
        return
    second = 4 + 8 + 4 + 4 + 8 + 8 + 1 + 1
    assert struct.unpack_from("<IQI", topics, second)[2] == asked


@IGGY.says(642, "GET_CLIENT tells the client by a number of 32 bits")
def test_a_client_is_named_by_its_number(client: Client) -> None:
    number = struct.unpack("<I", client.ask(20)[:4])[0]
    assert client.ask(21, u32(number)) == client.ask(20)
    assert status(client, 21, u32(number ^ 2**31)) == 100
