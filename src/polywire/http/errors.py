"""Our errors as HTTP's.

Promises: every kind has a status; the code and the message are in the body. Must not know: what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.responses import JSONResponse, Response

from polywire.errors import (
    BrokerError,
    Busy,
    Conflict,
    Corrupt,
    Denied,
    ErrorCode,
    Invalid,
    Missing,
    NotOwner,
    Unavailable,
)

STATUSES: Final[Mapping[type[BrokerError], int]] = {
    Invalid: 400,
    Denied: 403,
    Missing: 404,
    Conflict: 409,
    NotOwner: 421,
    Corrupt: 500,
    Busy: 503,
    Unavailable: 503,
}
WHO_ARE_YOU: Final = frozenset({ErrorCode.LOGIN_REQUIRED, ErrorCode.LOGIN_FAILED})


def answer(error: BrokerError) -> Response:
    """What a request that was refused is answered."""
    status = 401 if error.code in WHO_ARE_YOU else STATUSES[type(error)]
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="polywire", charset="UTF-8"'
    if error.retry_after_ms is not None:
        headers["Retry-After"] = str(-(-error.retry_after_ms // 1000))
    body = {"error": {"code": error.code.value, "message": error.message, "retry": error.retry.value}}
    return JSONResponse(body, status_code=status, headers=headers)
