"""Fuzz what is decoded before a login, and members' data: tokens, verifiers, subscriptions, names, patterns.

Run as ``python -m tests.fuzz.fuzz_logins``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polywire import matching, names
from polywire.broker.scram import Mechanism, Verifier, make_verifier, parse_verifier
from polywire.errors import Invalid
from polywire.protocols.kafka import sasl, subscription
from polywire.protocols.kafka.messages import Refused
from tests.fuzz.chance import fuzz
from tests.fuzz.decoders import Decoder, one_of_each

ITERATIONS: Final = 4096
VERIFIER: Final[Verifier] = make_verifier("password", Mechanism.SHA_256, iterations=ITERATIONS)
INTRODUCTIONS: Final = (b"n,,n=user,r=nonce", b"y,a=us=2Cer,n=us=2Cer,r=n=3D,x=y", b"n,,n==3D,r=1")
CHALLENGE: Final = sasl.Challenge(sasl.read_introduction(INTRODUCTIONS[0]), VERIFIER, "server")
SUBSCRIPTIONS: Final = (
    b"\0\0\0\0\0\1\0\1t\xff\xff\xff\xff",
    b"\0\1\0\0\0\2\0\1t\0\2uu\0\0\0\1x\0\0\0\1\0\1t\0\0\0\2\0\0\0\0\0\0\0\1",
    subscription.WRITING.encode({"t": (0, 1, 2), "other": ()}),
)


def read_proof(token: bytes) -> None:
    """Decode the second message of SCRAM, and use it."""
    messages, proof = CHALLENGE.read(token)
    VERIFIER.admits(messages, proof)
    assert CHALLENGE.accepted(messages).startswith(b"v=")


def read_subscription(data: bytes) -> None:
    """Decode a member's subscription, which names some topics or none."""
    reported: list[subscription.Subscription] = []

    def reading() -> Iterator[None]:
        reported.append((yield from subscription.read_subscriptions([("range", data), ("cooperative-sticky", data)])))

    for _ in reading():
        pass
    assert len(reported[0].topics) <= subscription.TOPICS_MAX
    kept = subscription.WRITING.decode(data)
    again = subscription.WRITING.encode(kept)
    assert {name: tuple(part) for name, part in subscription.WRITING.decode(again).items()} == {
        name: tuple(part) for name, part in kept.items()
    }


def parse_kept_verifier(data: bytes) -> None:
    """Decode a verifier from text; it round-trips."""
    found = parse_verifier(data.decode("utf-8", "replace"))
    assert parse_verifier(str(found)) == found


def read_name(data: bytes) -> None:
    """Unescape an escaped name."""
    text = data.decode("utf-8", "surrogateescape")
    escaped = names.escape(text)
    assert names.unescape(escaped) == text
    names.unescape(text)


def match_pattern(data: bytes) -> None:
    """Match a pattern in time proportional to its length times the text's."""
    pattern, _, text = data.decode("latin-1").partition("/")
    matching.matches(pattern[:200], text[:200])
    number = matching.signed_64(text)
    assert number is None or -(2**63) <= number < 2**63


PROOF: Final = CHALLENGE.text.encode().partition(b",s=")[0]
DECODERS: Final = (
    Decoder("sasl-words", sasl.read_words, (b"\0user\0password", b"user\0user\0\xc3\xa4", b"\0\0"), (Refused,)),
    Decoder("sasl-introduction", sasl.read_introduction, INTRODUCTIONS, (Refused,)),
    Decoder("sasl-proof", read_proof, (b"c=biws," + PROOF + b",p=" + b"A" * 43 + b"=",), (Refused,)),
    Decoder("subscription", read_subscription, SUBSCRIPTIONS),
    Decoder(
        "verifier", parse_kept_verifier, (str(VERIFIER).encode(), b"$scram-sha-512$4096$AA==$AA==$AA=="), (Invalid,)
    ),
    Decoder("name", read_name, (b"plain", b"a.b_c-d", b"%41%zz", "ä/ö".encode(), b"x" * 255), (Invalid,)),
    Decoder("pattern", match_pattern, (b"a*b*c/aabbcc", b"*" * 30 + b"/" + b"a" * 60, b"?x[a-z]/-9223372036854775808")),
)
INPUTS: Final = len(DECODERS)  # of a round
check_all = one_of_each(DECODERS)


if __name__ == "__main__":
    fuzz(check_all)
