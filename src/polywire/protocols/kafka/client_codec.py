"""For Kafka clients: encode requests and decode responses.

It uses the server's table of messages.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

from polywire.errors import PeerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka.structure_decoder import decode, skip_tags
from polywire.protocols.kafka.structure_encoder import encode
from polywire.types import Buffer

ANSWER_ELEMENTS_MAX: Final = 10_000_000  # limit for the elements of all arrays of one response

_HEAD: Final = Struct(">hhi")
_I16: Final = Struct(">h")
_I32: Final = Struct(">i")


def encode_request(api: Api, version: int, correlation_id: int, body: Any, *, client_id: str | None = None) -> bytes:
    name = b"" if client_id is None else client_id.encode()
    head = _HEAD.pack(api, version, correlation_id) + _I16.pack(-1 if client_id is None else len(name)) + name
    if schema.is_flexible(api, version):
        head += b"\0"
    return b"".join(encode(schema.request_program(api, version), body, head))


def decode_response(api: Api, version: int, frame: Buffer) -> tuple[int, Any]:
    """Return the correlation id and the body of a response that has no length prefix.

    Raises PeerError if it is malformed.
    """
    view = memoryview(frame)
    if len(view) < _I32.size:
        raise PeerError(f"response ends early bytes={len(view)}", fatal=True)
    (correlation_id,) = _I32.unpack_from(view)
    at = _I32.size
    if schema.is_flexible(api, version) and api is not Api.API_VERSIONS:
        at = skip_tags(view, at)
    program = schema.response_program(api, version)
    return correlation_id, decode(program, view, at, elements_max=ANSWER_ELEMENTS_MAX)
