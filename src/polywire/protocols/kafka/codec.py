"""For the broker: decode Kafka requests and encode responses.

A malformed request raises PeerError, which closes the connection. Bytes after a complete body are ignored, because some
common clients send them.
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

HEAD_BYTES_MIN: Final = 10  # api key, version, correlation id, length of the client id

# stands for the version of a SASL token without a header; its response has no header either (spec: kafka#sasl)
BARE: Final = -1

_HEAD: Final = Struct(">hhih")
_I32: Final = Struct(">i")
_APIS: Final = {int(api): api for api in Api}
# read for every request; a module constant is ten times as fast as an attribute
_API_VERSIONS: Final = Api.API_VERSIONS


def decode_head(frame: Buffer, served: Mapping[Api, Served] = SERVED) -> tuple[Request, int]:
    """Decode the header of a request. Return the request without its body, and the position of the body.

    The position is 0 for an unknown version of API_VERSIONS, whose body is ignored. Raises PeerError for malformed
    requests and unsupported versions.
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
        if api is not _API_VERSIONS:
            raise PeerError(f"unsupported version api={api.name.lower()} version={version}", fatal=True)
        at = 0
    elif schema.is_flexible(api, version):
        at = skip_tags(view, at)
    return api, version, correlation_id, client_id, at


def decode_request(frame: Buffer, served: Mapping[Api, Served] = SERVED) -> Request:
    """Decode the request in a frame that has no length prefix.

    Raises PeerError for malformed requests and unsupported versions. Raises Wide if the request has too many elements
    to decode in one step.
    """
    api, version, correlation_id, client_id, at = _head(frame, served)
    body = decode(schema.request_program(api, version), frame, at, elements_max=AT_ONCE_MAX) if at else None
    return Request(api, version, correlation_id, client_id, body)


def decode_wide_body(frame: Buffer, head: Request, start: int) -> Iterator[Any]:
    """Decode a request body of any size in steps.

    Yields None after each step, and the body at the end. Raises PeerError if the body is malformed.
    """
    return decode_with_pauses(schema.request_program(head.api, head.version), frame, start)


def bare_token(frame: Buffer) -> Request:
    """Return the request for a frame that is only a SASL token, without a header (SaslHandshake version 0)."""
    body = schema.request(Api.SASL_AUTHENTICATE)(auth_bytes=bytes(frame))
    return Request(Api.SASL_AUTHENTICATE, BARE, 0, None, body)


def encode_response(request: Request, body: Any) -> list[Buffer]:
    """Encode a response as consecutive buffers. The first one begins with the length prefix."""
    api, version = request.api, request.version
    if version == BARE:
        return [] if body.error else [_I32.pack(len(body.auth_bytes)) + body.auth_bytes]
    if api is _API_VERSIONS and request.body is None:
        version = 0
    head = _I32.pack(request.correlation_id)
    if schema.is_flexible(api, version) and api is not _API_VERSIONS:
        head += b"\0"
    return encode(schema.response_program(api, version), body, head)


def encode_response_entries(request: Request, body: Any) -> Iterator[None]:
    """Encode the entries of a response in steps. Yields after each step.

    The entries in ``body`` are replaced by their encoded bytes, which ``encode_response`` copies. The response must not
    contain records.
    """
    return encode_entries(schema.response_program(request.api, request.version), body)


def encode_response_entry(request: Request, entry: Any) -> Iterator[bytes | None]:
    """Encode one entry of a response in steps. Yields None after each step, and the bytes at the end."""
    return encode_entry(schema.response_program(request.api, request.version), entry)


def unknown_version() -> Any:
    """Return the response to an unknown version of API_VERSIONS: it has the versions that the broker supports."""
    answer = schema.response(Api.API_VERSIONS)
    first, last, _ = SERVED[Api.API_VERSIONS]
    own = answer.ApiKeys(api_key=int(Api.API_VERSIONS), min_version=first, max_version=last)
    return answer(error=int(WireError.UNSUPPORTED_VERSION), api_keys=[own])
