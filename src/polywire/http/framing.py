"""Find the end of an HTTP request. Head and body have limits, and a body without Content-Length is rejected."""

from __future__ import annotations

from enum import Enum
from typing import Final

HEAD_BYTES_MAX: Final = 16 * 1024  # request line and headers
BODY_BYTES_MAX: Final = 2 * 1024 * 1024  # body of a request
HEADERS_MAX: Final = 100  # headers of a request
_END: Final = b"\r\n\r\n"
_DIGITS_MAX: Final = 15  # of a Content-Length


class Refusal(Enum):
    """The reason why a request is rejected before it is parsed; the connection is closed.

    The value is the status line of the response.
    """

    MALFORMED = "400 Bad Request"
    LENGTH_REQUIRED = "411 Length Required"
    BODY_TOO_LARGE = "413 Content Too Large"
    HEAD_TOO_LARGE = "431 Request Header Fields Too Large"

    @property
    def answer(self) -> bytes:
        """The encoded response."""
        return f"HTTP/1.1 {self.value}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()


def request_bytes(data: memoryview, body_bytes_max: int = BODY_BYTES_MAX) -> int | Refusal:
    """Return the length of the request at the start of ``data``, including its body; 0 while its head is incomplete."""
    beginning = bytes(data[: HEAD_BYTES_MAX + len(_END)])
    end = beginning.find(_END)
    if end < 0:
        return Refusal.HEAD_TOO_LARGE if len(beginning) > HEAD_BYTES_MAX else 0
    lines = beginning[:end].split(b"\r\n")
    if len(lines) > HEADERS_MAX + 1:
        return Refusal.HEAD_TOO_LARGE
    length = 0
    for line in lines[1:]:
        if line[:1] in (b" ", b"\t"):  # a folded header, from which other software might read another length
            return Refusal.MALFORMED
        name, _, value = line.partition(b":")
        match name.strip().lower():
            case b"transfer-encoding":
                return Refusal.LENGTH_REQUIRED
            case b"content-length":
                digits = value.strip()
                if not digits.isdigit() or len(digits) > _DIGITS_MAX:
                    return Refusal.MALFORMED
                length = int(digits)
    if length > body_bytes_max:
        return Refusal.BODY_TOO_LARGE
    return end + len(_END) + length
