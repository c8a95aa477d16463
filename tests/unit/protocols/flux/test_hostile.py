"""Hostile FLUX requests: processor time stays linear in their length, and other clients are not affected."""

from __future__ import annotations

import pytest

from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from tests.processor import processor_used
from tests.unit.protocols.flux.dialogue import World

ROOM = LINE_BYTES_MAX - 64
LINE_S_MAX = 0.1  # a quadratic parser took 4 s for one line, this one about 1 ms


@pytest.mark.parametrize(
    "line",
    [
        b"V1|1|OFFSET|g t " + b"0" * ROOM + b"x",
        b"V1|1|OFFSET|g t " + b"9" * ROOM,
        b"V1|1|COMMIT|g t m " + b"0" * ROOM + b" 0 0 x",
        b"V1|1|OFFSET|" + "\u2003".encode() * (ROOM // 3) + b"x",
        b"x" + "\u2003".encode() * (ROOM // 3) + b"x",
        b"\x85" * ROOM,
        b" \t" * (ROOM // 2) + b"\x85",
        b"V1|1|" + "ß".encode() * (ROOM // 2) + b"|x",
        b"V1|1|ADMIN_SET_PARTITION_LEADER|t 0 0 " + b"1," * (ROOM // 2),
        b"|" * ROOM,
    ],
)
def test_a_long_line_is_scanned_once(line: bytes) -> None:
    peer = World().connect()
    with processor_used() as used:
        assert "|ERR|" in peer.ask(line)
    assert used.seconds < LINE_S_MAX


@pytest.mark.parametrize("command", ["ADMIN_FENCE_BROKER", "ADMIN_UNFENCE_BROKER"])
def test_negative_broker_numbers_are_refused(command: str) -> None:
    assert World().connect().ask(f"V1|1|{command}|-1") == "V1|1|ERR|BAD_REQUEST|broker id must be >= 0"
