"""Frames of Kafka's wire: requests decoded, answers encoded.

Promises: what makes no sense raises PeerError, which ends the connection, as peers of this wire expect; bytes behind a complete body are
ignored, because widespread clients send some. Must not know: sockets, the broker, what a request is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any, Final

from polywire.errors import PeerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import SERVED, Api, Request, Served, WireError
from polywire.protocols.kafka.structure_decoder import AT_ONCE_MAX, decode, decode_with_pauses, skip_tags
from polywire.protocols.kafka.structure_encoder import encode, encode_entries, encode_entry
from polywire.types import Buffer

HEAD_BYTES_MIN: Final = 10  # api, version, correlation, length of the client id

BARE: Final = -1  # version of a token that comes without a header, and is answered so (spec: kafka#sasl)

_HEAD: Final = Struct(">hhih")
_I32: Final = Struct(">i")
_APIS: Final = {int(api): api for api in Api}


def decode_head(frame: Buffer, served: Mapping[Api, Served] = SERVED) -> tuple[Request, int]:
    """A request without its body, and where that begins; 0 for a version of API_VERSIONS that nobody here knows.

    Raises PeerError for bytes that are none and for versions that are not served.
    """
    api, version, correlation_id, client_id, at = _head(frame, served)
    return Request(api, version, correlation_id, client_id, None), at


def _head(frame: Buffer, served: Mapping[Api, Served]) -> tuple[Api, int, int, str | None, int]:
    view = memoryview(frame)
    if len(view) < HEAD_BYTES_MIN:
        raise PeerError(f"request ends early bytes={len(view)}", fatal=True)
    number, version, correlation_id, id_bytes = _HEAD.unpack_from(view)
    api = _APIS.get(number)
    versions = None if api is None else served.get(api)
    if api is None or versions is None:
        raise PeerError(f"unsupported request api={number} version={version}", fatal=True)
    at = HEAD_BYTES_MIN + max(id_bytes, 0)
    if id_bytes < -1 or at > len(view):
        raise PeerError(f"client id is longer than the request bytes={id_bytes}", fatal=True)
    client_id = None if id_bytes < 0 else str(view[HEAD_BYTES_MIN:at], "utf-8", "replace")
    if not versions.answered_from <= version <= versions.last:
        if api is not Api.API_VERSIONS:
            raise PeerError(f"unsupported version api={api.name.lower()} version={version}", fatal=True)
        at = 0
    elif schema.is_flexible(api, version):
        at = skip_tags(view, at)
    return api, version, correlation_id, client_id, at


def decode_request(frame: Buffer, served: Mapping[Api, Served] = SERVED) -> Request:
    """The request in a frame, without its length.

    Raises PeerError for bytes that are none and for versions that are not served, and Wide where there is more than is read at once.
    """
    api, version, correlation_id, client_id, at = _head(frame, served)
    body = decode(schema.request_program(api, version), frame, at, elements_max=AT_ONCE_MAX) if at else None
    return Request(api, version, correlation_id, client_id, body)


def decode_wide_body(frame: Buffer, head: Request, start: int) -> Iterator[Any]:
    """The body of a request of any width, at last; None now and then before. Raises PeerError."""
    return decode_with_pauses(schema.request_program(head.api, head.version), frame, start)


def bare_token(frame: Buffer) -> Request:
    """A message of a login that comes without a header."""
    body = schema.request(Api.SASL_AUTHENTICATE)(auth_bytes=bytes(frame))
    return Request(Api.SASL_AUTHENTICATE, BARE, 0, None, body)


def encode_response(request: Request, body: Any) -> list[Buffer]:
    """The answer to a request as parts to be sent one behind the other, its length in front."""
    api, version = request.api, request.version
    if version == BARE:
        return [] if body.error else [_I32.pack(len(body.auth_bytes)) + body.auth_bytes]
    if api is Api.API_VERSIONS and request.body is None:
        version = 0
    head = _I32.pack(request.correlation_id)
    if schema.is_flexible(api, version) and api is not Api.API_VERSIONS:
        head += b"\0"
    return encode(schema.response_program(api, version), body, head)


def encode_response_entries(request: Request, body: Any) -> Iterator[None]:
    """Put bytes in place of the entries of an answer without records, one after the other, before ``encode_response``."""
    return encode_entries(schema.response_program(request.api, request.version), body)


def encode_response_entry(request: Request, entry: Any) -> Iterator[bytes | None]:
    """The bytes of one entry of such an answer, and None now and then before."""
    return encode_entry(schema.response_program(request.api, request.version), entry)


def unknown_version() -> Any:
    """The answer to API_VERSIONS of an unknown version: it names the versions of itself, and the peer asks again."""
    answer = schema.response(Api.API_VERSIONS)
    first, last, _ = SERVED[Api.API_VERSIONS]
    own = answer.ApiKeys(api_key=int(Api.API_VERSIONS), min_version=first, max_version=last)
    return answer(error=int(WireError.UNSUPPORTED_VERSION), api_keys=[own])
