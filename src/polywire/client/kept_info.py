"""Transactional ids and writers as listed by a broker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A transactional id and its latest transaction. ``owner`` is the name of a user, or empty."""

    id: str
    epoch: int
    state: str
    messages: int
    positions: int
    idle_ms: int
    owner: str


@dataclass(frozen=True, slots=True)
class WriterInfo:
    """A writer and the last number it published. ``owner`` is the name of a user, or empty."""

    writer: str
    number: int
    idle_ms: int
    owner: str
