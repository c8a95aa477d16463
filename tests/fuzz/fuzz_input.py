"""Fuzz input of the command line: lines of records, start positions, addresses, users files.

Run as ``python -m tests.fuzz.fuzz_input``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from polywire.broker.scram import Mechanism, make_verifier
from polywire.cli.record import LineFormat, line_of_record, record_of_line
from polywire.cli.start_position import parse_start
from polywire.client.address import split_address, split_login
from polywire.errors import Invalid
from polywire.records.columns import Event, Header, HeaderKind, Record
from polywire.records.rows import from_records
from polywire.server.config import parse_address
from polywire.server.users import read_users
from tests.fuzz.chance import fuzz
from tests.fuzz.decoders import Decoder, one_of_each

RECORDS: Final = (
    Record(b"value", key=b"key", headers=(Header(b"h", b"v"), Header(b"n", None, value_kind=HeaderKind.NULL))),
    Record(b"\xff\xfe", key=None, id=bytes(range(16)), origin_time_us=1_700_000_000_000_000),
    Record(None, key=b"", event=Event("type", 1, 2, b"meta")),
    Record(b"v", headers=(Header(b"i", b"\1\0\0\0", value_kind=HeaderKind.INT32),), origin_time_us=-(2**62)),
)
LINES: Final = tuple(line_of_record(one, topic="t", partition=0, form=LineFormat.JSONL)[:-1] for one in RECORDS)
MORE_LINES: Final = (
    b'{"value": {"a": [1, 2.5e300, null]}, "headers": {"h": true}}',
    b'{"value": 1e999, "origin_timestamp": "2026-01-01T00:00:00+23:59"}',
    b'{"event": {"type": "t", "schema_version": 99999999999999999999}, "origin_timestamp": 99999999999999999999}',
    b'{"headers": [{"key": "k", "value": "x", "value_kind": "uint128"}], "value": "\\ud800"}',
    b"[" * 2000,
)
STARTS: Final = (
    b"earliest",
    b"latest",
    b"0",
    b"18446744073709551616",
    b"2026-11-22T12:00:00.5Z",
    b"0001-01-01",
    b"1" * 5000,
)
ADDRESSES: Final = (b"localhost:9555", b"[::1]:9092", b"name:pass%40word@host:1", b"host:99999", b"@:", b"h:\xd9\xa1")
ARGON: Final = "$argon2id$v=19$m=65536,t=3,p=4$c2FsdHNhbHRzYWx0$aGFzaGhhc2hoYXNo"
USERS: Final = (
    f"# a comment\n\nalice:{ARGON}:admin\nbob:{ARGON} {make_verifier('p', Mechanism.SHA_512)}:produce@s/t,consume\n".encode(),
    f"a:{ARGON}:\r\nb:{ARGON}:produce@\xe4\n".encode("latin-1"),
)
USERS_FILE: Final = Path(mkdtemp()) / "users"


def read_line(line: bytes) -> None:
    """Read a record, which can be stored and round-trips as a line, or see it refused."""
    record = record_of_line(line, form=LineFormat.JSONL, key=None)
    from_records([record])
    again = line_of_record(record, topic="t", partition=0, form=LineFormat.JSONL)
    assert record_of_line(again[:-1], form=LineFormat.JSONL, key=None) == replace(record, offset=-1)


def read_start(text: bytes) -> None:
    """Read a start position."""
    parse_start(text.decode("utf-8", "surrogateescape"))


def read_address(text: bytes) -> None:
    """Read the login and address of a client."""
    _, port = split_address(split_login(text.decode("utf-8", "surrogateescape"))[1])
    assert 0 <= port <= 65_535


def read_listener(text: bytes) -> None:
    """Read a listener's address, which round-trips."""
    found = parse_address(text.decode("utf-8", "surrogateescape"))
    assert parse_address("off" if found is None else str(found)) == found


def read_file_of_users(content: bytes) -> None:
    """Read a users file, or get an error for a line."""
    with os.fdopen(os.open(USERS_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    for user in read_users(USERS_FILE):
        assert user.name


DECODERS: Final = (
    Decoder("line", read_line, (*LINES, *MORE_LINES), (Invalid,)),
    Decoder("start", read_start, STARTS, (Invalid,)),
    Decoder("address", read_address, ADDRESSES, (Invalid,)),
    Decoder("listener", read_listener, (b"off", *ADDRESSES), (Invalid,)),
    Decoder("users", read_file_of_users, USERS, (Invalid,)),
)
INPUTS: Final = len(DECODERS)  # of a round
check_all = one_of_each(DECODERS)


if __name__ == "__main__":
    fuzz(check_all)
