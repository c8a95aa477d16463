"""Convert errors to HTTP responses. The body contains the code, the message, and whether to retry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
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
_KINDS: Final = {
    400: Invalid,
    401: Denied,
    403: Denied,
    404: Missing,
    409: Conflict,
    503: Busy,
}  # without the kinds of errors that have further fields
CATALOG: Final = "/iceberg"
"""Path of the Iceberg REST catalog, which has its own form of errors."""
_CATALOG_TYPES: Final = {
    400: "BadRequestException",
    401: "NotAuthorizedException",
    403: "ForbiddenException",
    404: "NoSuchTableException",
    503: "ServiceUnavailableException",
}
LOGIN_CODES: Final = frozenset({ErrorCode.LOGIN_REQUIRED, ErrorCode.LOGIN_FAILED})


def error_response(error: BrokerError, path: str = "") -> Response:
    """Return the response for an error, in the form that belongs to the path of the request."""
    status = 401 if error.code in LOGIN_CODES else STATUSES[type(error)]
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="polywire", charset="UTF-8"'
    if error.retry_after_ms is not None:
        headers["Retry-After"] = str(-(-error.retry_after_ms // 1000))
    body: dict[str, dict[str, object]] = {
        "error": {"code": error.code.value, "message": error.message, "retry": error.retry.value}
    }
    if path.startswith(f"{CATALOG}/"):
        kind = _CATALOG_TYPES.get(status, "InternalServerError")
        body = {"error": {"message": error.message, "type": kind, "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def raise_error(response: Response) -> None:
    """Raise the error that a response of another process contains, if it contains one."""
    if response.status_code == 200:
        return
    error = msgspec.json.decode(response.body)["error"]
    kind = _KINDS.get(response.status_code, Unavailable)
    raise kind(ErrorCode(error["code"]), error["message"])
