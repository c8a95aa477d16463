"""The wires under test: a later wire joins the suite by one entry here and its client.

Each wire's abilities are those its client declares, so a table of what works is a table of what was run.
"""

from __future__ import annotations

from dataclasses import dataclass

from polywire.client import flux, polywire
from polywire.client.base import Ability


@dataclass(frozen=True, slots=True)
class Wire:
    """A wire that the scenarios run through."""

    name: str
    abilities: frozenset[Ability]


WIRES = (
    Wire("flux", flux.ABILITIES),
    Wire("polywire", polywire.ABILITIES),
)
