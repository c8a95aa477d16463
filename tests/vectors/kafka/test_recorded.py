"""Requests of real clients to a broker of ours: decoded, and encoded to the same bytes.

``recorded.txt``: a line is a client and a request without its length. confluent-kafka 2.16.1 (librdkafka 2.16.0),
kafka-python 3.0.12 and aiokafka 0.14.0 produced a record to topic ``t`` and read it as members of group ``g``, against
the versions of ``SERVED``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polywire.protocols.kafka import client_codec, codec
from polywire.protocols.kafka.compression import decode_batch
from polywire.protocols.kafka.decoder import BATCH_BYTES_MAX
from polywire.protocols.kafka.messages import Api, Request
from polywire.records.rows import to_records

RECORDED = [
    (client, bytes.fromhex(frame))
    for client, _, frame in (
        line.partition(" ")
        for line in (Path(__file__).parent / "recorded.txt").read_text(encoding="ascii").splitlines()
    )
]
CLIENTS = {"librdkafka", "kafka-python", "aiokafka"}
ASKED = {
    Api.API_VERSIONS,
    Api.METADATA,
    Api.PRODUCE,
    Api.FIND_COORDINATOR,
    Api.JOIN_GROUP,
    Api.SYNC_GROUP,
    Api.HEARTBEAT,
    Api.OFFSET_FETCH,
    Api.OFFSET_COMMIT,
    Api.LIST_OFFSETS,
    Api.FETCH,
    Api.LEAVE_GROUP,
}


def sent(client: str, api: Api) -> Any:
    """Return the body of a client's request."""
    [request] = [codec.decode_request(frame) for name, frame in RECORDED if name == client and frame[1] == api]
    return request.body


def rewritten(request: Request) -> bytes:
    return client_codec.encode_request(
        request.api, request.version, request.correlation_id, request.body, client_id=request.client_id
    )


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_a_recorded_request_is_encoded_to_the_same_bytes(number: int) -> None:
    _, frame = RECORDED[number]
    request = codec.decode_request(frame)
    assert request.client_id
    assert rewritten(request)[4:] == frame


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_every_client_sent_the_usual_requests(client: str) -> None:
    assert {codec.decode_request(frame).api for name, frame in RECORDED if name == client} >= ASKED


@pytest.mark.parametrize(
    ("client", "headers"),
    [("librdkafka", [(b"h", b"1"), (b"n", None)]), ("kafka-python", [(b"h", b"1")]), ("aiokafka", [])],
)
def test_the_produced_records(client: str, headers: list[tuple[bytes, bytes | None]]) -> None:
    [topic] = sent(client, Api.PRODUCE).topics
    [partition] = topic.partitions
    assert (topic.name, partition.index) == ("t", 0)
    head, built = decode_batch(partition.records, bytes_max=BATCH_BYTES_MAX)
    [record] = to_records(built.batch)
    assert (record.key, record.value) == (b"key", b"value")
    assert [(header.key, header.value) for header in record.headers] == headers
    assert (head.producer_id, head.base_sequence) == ((-1, 0) if client == "aiokafka" else (77, 0))


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_the_requests_about_the_group(client: str) -> None:
    joined = sent(client, Api.JOIN_GROUP)
    assert (joined.group_id, joined.protocol_type) == ("g", "consumer")
    assert b"\0\1t" in joined.protocols[0].metadata
    assert sent(client, Api.HEARTBEAT).generation_id == 1
    [topic] = sent(client, Api.OFFSET_COMMIT).topics
    assert topic.name == "t"
