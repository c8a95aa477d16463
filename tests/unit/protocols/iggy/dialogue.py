"""An Iggy connection without a socket: frames of both framings; the clock starts at the T of the examples."""

from __future__ import annotations

import time
from struct import pack_into, unpack_from

from polywire.broker.settings import BrokerSettings
from polywire.protocols.iggy.context import IggySettings
from polywire.protocols.iggy.factory import IggyFactory
from tests.unit.protocols import dialogue

WAIT_S_MAX = 60.0
T_US = 1_693_440_000_000_000  # spec: iggy#d0-examples
CLIENT = bytes.fromhex("22110000000000000000000000000000")


class World(dialogue.World[IggyFactory]):
    """The Iggy protocol over a broker in memory."""

    def __init__(self, *, broker: BrokerSettings | None = None, iggy: IggySettings | None = None) -> None:
        super().__init__(lambda opened: IggyFactory(opened, iggy), broker, now_us=T_US)

    def connect(self) -> Dialogue:
        """Open a new connection."""
        return Dialogue(self)


class Dialogue(dialogue.Dialogue):
    """One connection."""

    local = ("127.0.0.1", 8090)

    def ask(self, frame: bytes) -> bytes:
        """Send one request and return its raw response; a password may have to be hashed meanwhile."""
        self.feed(frame)
        deadline = time.monotonic() + WAIT_S_MAX
        self.pass_by()
        while not self.sent and not self.closed:
            assert time.monotonic() < deadline, "no response arrived"
            time.sleep(0.001)
            self.pass_by()
        return self.take()

    def classic(self, code: int, payload: bytes = b"") -> tuple[int, bytes]:
        """Return the status and payload of the response to a request of the classic framing."""
        answer = self.ask(classic(code, payload))
        status, size = unpack_from("<II", answer)
        assert size == len(answer) - 8
        return status, answer[8:]

    def headered(self, operation: int, body: bytes = b"", *, code: int = 0, number: int = 0) -> tuple[int, bytes]:
        """Return the status and body of the response of the headered framing; for an eviction, the negated reason."""
        answer = self.ask(headered(operation, body, code=code, number=number))
        if answer[60] == 13:
            assert self.closed
            return -answer[255], b""
        assert answer[60] == 8
        assert unpack_from("<I", answer, 48)[0] == len(answer)
        return unpack_from("<I", answer, 216)[0], answer[256:]


def classic(code: int, payload: bytes = b"") -> bytes:
    """Return a request frame of the classic framing."""
    return (4 + len(payload)).to_bytes(4, "little") + code.to_bytes(4, "little") + payload


def headered(operation: int, body: bytes = b"", *, code: int = 0, number: int = 0, epoch: int = 0) -> bytes:
    """Return a request frame of the headered framing."""
    head = bytearray(256)
    pack_into("<I", head, 48, 256 + len(body))
    head[60] = 5
    head[128:144] = CLIENT
    pack_into("<Q", head, 168, number)
    head[176] = operation
    pack_into("<Q", head, 184, epoch)
    pack_into("<I", head, 196, code)
    return bytes(head) + body
