"""Every message in every version, as a client of the official registry writes it.

``messages.txt`` was written with kafka-python 3.0.12 from the values of ``filling``, and with kafka-clients 4.3.0 for newer groups
and share groups, which kafka-python lacks. A line is the api, the version, ``>`` for a request or ``<`` for a response, and the body. A
version with the same bytes as the previous one has no line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.protocols.kafka import client_codec, codec, schema
from polywire.protocols.kafka.messages import SERVED, Api, Request, WireError
from polywire.protocols.kafka.schema import message
from polywire.protocols.kafka.structure_decoder import decode
from polywire.protocols.kafka.structure_encoder import encode
from tests.vectors.kafka.filling import filled


def kept() -> dict[tuple[Api, str], dict[int, bytes]]:
    """Return the bodies by api and direction, then by version."""
    found: dict[tuple[Api, str], dict[int, bytes]] = {}
    for line in (Path(__file__).parent / "messages.txt").read_text(encoding="ascii").splitlines():
        api, version, mark, body = line.split(" ")
        found.setdefault((Api(int(api)), mark), {})[int(version)] = bytes.fromhex(body)
    return found


KEPT = kept()


def cases() -> Iterator[tuple[Api, str, int]]:
    for api in sorted(Api):
        first, last = message(api).versions
        yield from ((api, mark, version) for mark in "><" for version in range(first, last + 1))


@pytest.mark.parametrize(("api", "mark", "version"), list(cases()))
def test_messages_equal_those_of_a_real_client(api: Api, mark: str, version: int) -> None:
    structure = message(api).request if mark == ">" else message(api).response
    program = (schema.request_program if mark == ">" else schema.response_program)(api, version)
    bodies = KEPT[api, mark]
    body = bodies[max(known for known in bodies if known <= version)]
    record = filled(structure, version)
    assert decode(program, body) == record
    assert b"".join(encode(program, record)) == len(body).to_bytes(4, "big") + body


def test_every_message_is_recorded() -> None:
    assert {api for api, _ in KEPT} == set(Api)


def test_the_first_request_of_a_connection() -> None:
    """API_VERSIONS 3: a flexible header before a flexible body."""
    frame = bytes.fromhex("0012 0003 00000001 0007 72646b61666b61 00 0b6c696272646b61666b61 07322e31362e30 00")
    request = codec.decode_request(frame)
    assert (request.api, request.version, request.correlation_id, request.client_id) == (18, 3, 1, "rdkafka")
    assert request.body.client_software_name == "librdkafka"
    assert request.body.client_software_version == "2.16.0"


def test_a_response_about_versions_never_has_tags_in_its_header() -> None:
    answer = schema.response(Api.API_VERSIONS)(api_keys=[], throttle_ms=0)
    [sent] = codec.encode_response(Request(Api.API_VERSIONS, 3, 5, None, schema.request(Api.API_VERSIONS)()), answer)
    assert bytes(sent) == bytes.fromhex("0000000c 00000005 0000 01 00000000 00")
    correlation_id, body = client_codec.decode_response(Api.API_VERSIONS, 3, bytes(sent)[4:])
    assert (correlation_id, body) == (5, answer)


def test_an_unknown_version_of_api_versions_gets_a_response_that_clients_retry() -> None:
    request = codec.decode_request(bytes.fromhex("0012 0063 00000000 ffff 00 01 02 03"))
    assert request.body is None
    answered = b"".join(codec.encode_response(request, codec.unknown_version()))
    assert answered == bytes.fromhex("00000010 00000000 0023 00000001 0012 0000 0004")
    assert codec.unknown_version().error == WireError.UNSUPPORTED_VERSION


def test_every_served_version_is_defined() -> None:
    for api, served in SERVED.items():
        versions = message(api).versions
        assert served.answered_from in versions
        assert served.last in versions
        assert served.first <= served.answered_from
