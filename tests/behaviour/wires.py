"""The protocols under test: a new protocol joins the suite with one entry here and its client.

Each protocol's abilities are those that its client declares, so the table of results shows what was run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polywire.client import cursus, flux, iggy, kafka, kafka07, polywire
from polywire.client.base import Ability
from polywire.protocols.cursus.messages import frame
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.messages import Code
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import encode_request
from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka07.messages import encode_fetch
from polywire.protocols.polywire.codec import MAGIC, encode_head
from polywire.protocols.polywire.messages import Fetch, Verb


@dataclass(frozen=True, slots=True)
class Wire:
    """A protocol that the scenarios use.

    opening: first bytes of a connection. fetch: request number n for a partition from its start, for misbehaving
    clients. drops_keys: keys choose a partition and are not sent. makes_any_name: it creates topics of any name.
    """

    name: str
    abilities: frozenset[Ability]
    opening: bytes
    fetch: Callable[[int, str, int], bytes]
    drops_keys: bool = False
    makes_any_name: bool = True


def _flux_fetch(number: int, topic: str, partition: int) -> bytes:
    return f"V1|{number}|CONSUME|{topic} {partition} 0\n".encode()


def _cursus_fetch(number: int, topic: str, partition: int) -> bytes:
    return frame(f"CONSUME topic={topic} partition={partition} offset=0 member=m{number}".encode())


def _iggy_fetch(number: int, topic: str, partition: int) -> bytes:
    at = client_codec.place(iggy.READER, client_codec.ident("default") + client_codec.ident(topic), partition + 1)
    return client_codec.request(Code.POLL, client_codec.poll(at, 1, 0, 1_000))


def _polywire_fetch(number: int, topic: str, partition: int) -> bytes:
    return encode_head(Verb.FETCH, number, Fetch(topic, partition, 0))


def _kafka_fetch(number: int, topic: str, partition: int) -> bytes:
    asked = schema.request(Api.FETCH)
    entries = [asked.Topics.Partitions(partition=partition, fetch_offset=0, partition_max_bytes=1 << 20)]
    body = asked(topics=[asked.Topics(topic=topic, partitions=entries)])
    return encode_request(Api.FETCH, 12, number, body)


def _kafka07_fetch(number: int, topic: str, partition: int) -> bytes:
    return encode_fetch(topic.encode(), partition, 0, 1 << 20)


WIRES = (
    Wire("flux", flux.ABILITIES, b"", _flux_fetch),
    Wire("cursus", cursus.ABILITIES, b"", _cursus_fetch, makes_any_name=False),
    Wire("iggy", iggy.ABILITIES, b"", _iggy_fetch, makes_any_name=False),
    Wire("kafka", kafka.ABILITIES, b"", _kafka_fetch, makes_any_name=False),
    Wire("kafka07", kafka07.ABILITIES, b"", _kafka07_fetch, drops_keys=True),
    Wire("polywire", polywire.ABILITIES, MAGIC, _polywire_fetch),
)
