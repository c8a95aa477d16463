"""Protocol detection: no first frame of one protocol is taken for another protocol, for text or for TLS."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Final

import pytest

from polywire.errors import PeerError
from polywire.protocols.cursus.messages import frame
from polywire.protocols.iggy.factory import COMMANDS, IggyFactory
from polywire.protocols.iggy.messages import Code
from polywire.protocols.iggy.recognition import Recognition, is_text
from polywire.protocols.iggy.session import FRAME_BYTES_MAX
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.config import ServeConfig
from polywire.server.recognition import PREFIX_BYTES_MAX, recognise
from polywire.server.tls import HELLO_BYTES, is_hello
from polywire.server.wires import factories_of
from polywire.testing.memory_broker import MemoryBroker
from tests.permissions.cases import cases
from tests.unit.protocols.iggy.dialogue import World, classic, headered
from tests.vectors.iggy import test_protocol_012 as d4
from tests.vectors.iggy import test_today as d3

LENGTHS: Final = 2**24  # all lengths of three bytes; the fourth is 0, or 1 up to the limit
# Bytes that some protocol checks: ends of ranges, white space, letters, starts of UTF-8 and compressed bodies.
TELLING: Final = (
    *range(16),
    *b"\x1f\x20",
    *b"1AIPUVZagvz|",
    0x7F,
    0x80,
    0x85,
    0x8B,
    0xA0,
    0xBA,
    0xC2,
    0xE2,
    0xF1,
    0xF3,
    0xFF,
)
FIRST_CODES: Final = sorted(code for code, command in COMMANDS.items() if not command.today)


@pytest.fixture(scope="module")
def factories() -> Sequence[SessionFactory]:
    """Return all protocols, in the order in which the port for any protocol tries them."""
    return factories_of(MemoryBroker().broker, ServeConfig())


def recognised(factories: Sequence[SessionFactory], data: bytes) -> str:
    """Return the protocol of these first bytes, however they are split."""
    for size in range(1, min(len(data), PREFIX_BYTES_MAX) + 1):
        factory = recognise(factories, memoryview(data)[:size])
        if factory is not None:
            return factory.wire
    return ""


# Iggy's own port


def test_no_length_of_a_request_is_text() -> None:
    assert not any(map(is_text, range(LENGTHS)))
    assert not any(is_text(LENGTHS + length) for length in range(0, FRAME_BYTES_MAX - LENGTHS, 257))
    assert all(
        is_text(int.from_bytes(word, "little")) for word in (b"GET ", b"POST", b"HEAD", b"DELE", b"OPTI", b"get ")
    )


@pytest.mark.parametrize("length", [0x555555, 0x01555555, 0x7A7A7A, int.from_bytes(b"GET\0", "little")])
def test_a_first_request_whose_length_looks_like_letters(length: int) -> None:
    recognition = Recognition()
    recognition.see_framing(length)
    assert recognition.framed is False
    peer = World().connect()
    peer.feed(length.to_bytes(4, "little") + Code.SEND.to_bytes(4, "little"))
    assert peer.gave_up is None
    assert not peer.closed


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n", b"POST /topics HTTP/1.1\r\n", b"HELO there\r\n"])
def test_text_closes_the_connection(text: bytes) -> None:
    peer = World().connect()
    peer.feed(text)
    assert peer.gave_up is not None
    assert "was sent to the Iggy port" in peer.gave_up.message
    assert peer.take() == b""


# The port for any protocol


def test_no_length_of_an_iggy_request_begins_another_protocol(factories: Sequence[SessionFactory]) -> None:
    others = [factory for factory in factories if not isinstance(factory, IggyFactory)]
    for code in (Code.PING, Code.LOGIN, Code.SEND, Code.CREATE_STREAM, Code.CREATE_TOPIC):
        behind = code.to_bytes(4, "little")
        for head in itertools.product(TELLING, TELLING, TELLING, (0, 1)):
            opening = bytes(head) + behind
            assert not any(other.recognise(opening) for other in others), opening.hex()


def test_every_first_byte_of_a_length_with_every_code(factories: Sequence[SessionFactory]) -> None:
    for first, code in itertools.product(range(256), FIRST_CODES):
        length = first if first >= 4 else first + 0x5500
        assert recognised(factories, length.to_bytes(4, "little") + code.to_bytes(4, "little")) == "iggy"


def test_no_length_at_all_begins_another_protocol(factories: Sequence[SessionFactory]) -> None:
    """Walk all 2^24 lengths as a tree of bytes.

    A protocol that refused a prefix must refuse every continuation: random lengths check this.
    """
    behind = Code.SEND.to_bytes(4, "little")
    prefixes = [bytes((byte,)) for byte in range(256)]
    others = [factory.recognise for factory in factories if not isinstance(factory, IggyFactory)]
    undecided = [(other, prefix) for prefix in prefixes for other in others if _is_open(other, prefix)]
    for _ in range(2):
        undecided = [
            (other, prefix + byte) for other, prefix in undecided for byte in prefixes if _is_open(other, prefix + byte)
        ]
    for other, length in undecided:
        assert not other(length + b"\0" + behind), length.hex()
    chance = Random(7)
    for length in (chance.randbytes(3) for _ in range(50_000)):
        assert not any(other(length + b"\0" + behind) for other in others), length.hex()


def _is_open(recognise: Callable[[bytes], bool | None], prefix: bytes) -> bool:
    """Return whether a protocol may still be recognized; a part of a length must not decide for it."""
    found = recognise(prefix)
    assert found is not True, prefix.hex()
    return found is None


def test_an_iggy_length_of_the_letters_of_flux(factories: Sequence[SessionFactory]) -> None:
    for fourth in b"\0\1":
        assert recognised(factories, b"V1|" + bytes((fourth,)) + Code.SEND.to_bytes(4, "little")) == "iggy"
    for line in (b"V1|PRODUCE|a k:v\n", b"V1 | PRODUCE|a k:v\n", b" V1|\n", b"V1|\tPRODUCE"):
        assert recognised(factories, line) == "flux"


def first_frames() -> Iterator[tuple[str, bytes]]:
    """Return every request with which a connection may begin, by protocol."""
    for case in cases():
        if not isinstance(case.request, bytes) or case.wire == "http":
            continue
        if case.wire != "cursus":
            yield case.wire, case.request
        elif case.request[:1].isalpha():  # a command: bare, and in an envelope without a topic
            yield case.wire, frame(case.request)
            yield case.wire, frame(b"\0\0" + case.request)
    for body in (d3.REGISTER, d4.REGISTER, d4.REGISTER_2):
        yield "iggy", headered(1, body)
    yield "iggy", headered(2, code=Code.PING)
    yield "iggy", headered(2, d4.REGISTER, code=Code.BIND_SESSION)
    for login in (b"\x04iggy\x04iggy", b"\x04iggy\x04iggy\x06\0\0\x000.10.0\0\0\0\0"):
        yield "iggy", classic(Code.LOGIN, login)


def test_every_first_frame_is_its_own_protocols(factories: Sequence[SessionFactory]) -> None:
    seen = set()
    for wire, opening in first_frames():
        assert recognised(factories, opening) == wire, opening[:32].hex()
        seen.add(wire)
    assert seen == {"cursus", "flux", "iggy", "kafka", "kafka07"}


# TLS


def client_hellos() -> Iterator[bytes]:
    """Yield first messages of TLS clients: every version, with and without a name and protocols."""
    for least, name in itertools.product(
        (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3), (None, "localhost", "a" * 60 + ".example")
    ):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.minimum_version = least
        context.set_alpn_protocols(["h2", "http/1.1"] if name else ["polywire"])
        sent = ssl.MemoryBIO()
        with pytest.raises(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
        yield sent.read()


def test_client_hellos_are_tls_and_no_protocols_first_frame(factories: Sequence[SessionFactory]) -> None:
    for hello in client_hellos():
        assert is_hello(hello) is True
        assert {is_hello(hello[:size]) for size in range(1, HELLO_BYTES)} == {None}
        with pytest.raises(PeerError):
            recognise(factories, memoryview(hello))
        peer = World().connect()
        peer.feed(hello)
        assert not peer.take()[8:], "no request was executed"


def test_no_first_frame_is_tls() -> None:
    for _, opening in first_frames():
        assert is_hello(opening[:HELLO_BYTES].ljust(HELLO_BYTES, b"\xff")) is False
    longest = (
        4 + 257 + 257 + 4 + 1 + 2 + 255
    )  # of a command whose code has a 1 as its second byte: two identifiers and a name
    assert longest < int.from_bytes(b"\x16\x03", "little"), "so that its length does not begin as TLS does"
    assert {code for code in FIRST_CODES if code >> 8 == 1} == {300, 301, 302, 303, 304, 305, 402, 403, 503} & set(
        FIRST_CODES
    )
