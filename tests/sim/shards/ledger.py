"""What is known of records and positions that lie in several shards.

Promises: as ``Ledger``; what a commit means is judged when all shards have had the time to. Must not know: wires, which shard has what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from polywire.types import Level, PositionKind
from tests.sim.wires.ledger import Ledger, Owner, Place, Transaction

OWNERS: Final[Sequence[Owner]] = tuple((PositionKind.GROUP, name) for name in ("copiers", "copiers2", "copiers6"))
"""Whose positions move with transactions, at home in different shards."""


class ShardsLedger(Ledger):
    """Guards: ``_promised`` are the transactions whose commit was answered since nobody had anything more to do."""

    def __init__(self, durability: Level) -> None:
        super().__init__(durability)
        self._promised: list[Transaction] = []
        self.commits: Final[Counter[Owner]] = Counter()
        """How many were answered, by whose position moves with them."""

    def committed(self, transaction: Transaction) -> None:
        """Its commit was answered: it was decided, and every shard follows."""
        self._promised.append(transaction)
        self.commits[transaction.owner] += 1

    def _late(self, owner: Owner, place: Place) -> Sequence[int]:
        """What was asked of another process may lie in a link for as long as that one is away; what transactions move has its order."""
        spot = self.spots.get((owner, place))
        if spot is None or owner in OWNERS:
            return ()
        return [offset for offset, level in spot.asked if level is None]

    def calms(self) -> None:
        """Every shard has followed, and says next what it has."""
        for transaction in self._promised:
            super().committed(transaction)
        self._promised.clear()

    def calmed(self, positions: Mapping[Owner, int | None]) -> None:
        """Every shard has said what it has, and these are the positions that move with transactions."""
        self.settle_transactions(positions)
