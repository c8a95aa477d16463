"""The clients' view of records and offsets in several shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from polywire.types import Level, PositionKind
from tests.sim.wires.ledger import Ledger, Owner, Place, Transaction

OWNERS: Final[Sequence[Owner]] = tuple((PositionKind.GROUP, name) for name in ("copiers", "copiers2", "copiers6"))
"""The owners of offsets that transactions commit, with coordinators in different shards."""


class ShardsLedger(Ledger):
    """Guards: ``_promised`` are the transactions acknowledged since the shards last came to rest."""

    def __init__(self, durability: Level) -> None:
        super().__init__(durability)
        self._promised: list[Transaction] = []
        self.commits: Final[Counter[Owner]] = Counter()
        """The number of acknowledged commits, by the owner of the offset."""

    def committed(self, transaction: Transaction) -> None:
        """Note an acknowledged commit: it was decided, and every shard follows."""
        self._promised.append(transaction)
        self.commits[transaction.owner] += 1

    def _late(self, owner: Owner, place: Place) -> Sequence[int]:
        """Return offsets that may be stored late: requests wait in a link while the other process is away.

        Those of transactions are ordered.
        """
        spot = self.spots.get((owner, place))
        if spot is None or owner in OWNERS:
            return ()
        return [offset for offset, level in spot.asked if level is None]

    def calms(self) -> None:
        """Note that every shard has followed, and will report its content next."""
        for transaction in self._promised:
            super().committed(transaction)
        self._promised.clear()

    def calmed(self, positions: Mapping[Owner, int | None]) -> None:
        """Check the content of every shard, and the offsets that transactions committed."""
        self.settle_transactions(positions)
