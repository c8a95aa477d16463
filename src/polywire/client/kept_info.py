"""What a broker tells of transactional ids and writers.

Promises: plain values. Must not know: how lists are printed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A transactional id and its latest transaction. ``owner`` is a user's name, empty where it is nobody's."""

    id: str
    epoch: int
    state: str
    messages: int
    positions: int
    idle_ms: int
    owner: str


@dataclass(frozen=True, slots=True)
class WriterInfo:
    """A writer and the last number it published. ``owner`` is a user's name, empty where it is nobody's."""

    writer: str
    number: int
    idle_ms: int
    owner: str
