"""A producer of Kafka's transactions whose records and positions lie in several shards: it asks who leads, who coordinates, and again.

Promises: as ``Transactor``; at most one request is not answered, whichever process it is for. Must not know: sessions, how shards agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from polywire.protocols.kafka.messages import Api, WireError
from tests.sim.chance import Chance
from tests.sim.story import Story
from tests.sim.wires.ledger import Ledger, Owner
from tests.sim.wires.lone_kafka_peer import LoneKafkaPeer, Then, error_of
from tests.sim.wires.network import Link
from tests.sim.wires.transactor import Transactor

DIALECTS: Final[Sequence[Mapping[Api, int]]] = (
    {
        Api.INIT_PRODUCER_ID: 4,
        Api.ADD_PARTITIONS_TO_TXN: 3,
        Api.ADD_OFFSETS_TO_TXN: 3,
        Api.TXN_OFFSET_COMMIT: 3,
        Api.OFFSET_FETCH: 7,
        Api.PRODUCE: 9,
        Api.END_TXN: 3,
    },
    {
        Api.INIT_PRODUCER_ID: 4,
        Api.TXN_OFFSET_COMMIT: 5,
        Api.OFFSET_FETCH: 7,
        Api.PRODUCE: 12,
        Api.END_TXN: 5,
    },
)
"""Versions of requests: with what a transaction is about said first, and with an epoch for each."""
AGAIN: Final = frozenset(
    {
        WireError.CONCURRENT_TRANSACTIONS,
        WireError.COORDINATOR_NOT_AVAILABLE,
        WireError.COORDINATOR_LOAD_IN_PROGRESS,
        WireError.NOT_COORDINATOR,
        WireError.NOT_LEADER_OR_FOLLOWER,
        WireError.REQUEST_TIMED_OUT,
        WireError.UNSTABLE_OFFSET_COMMIT,
    }
)
"""At which clients ask once more."""
REPEATS: Final = 0.7  # of what was not answered, or refused for now


class Asked(NamedTuple):
    """A request that is not answered. shard: which process it is for."""

    api: Api
    then: Then
    fields: Mapping[str, Any]
    shard: int


class Mouth(LoneKafkaPeer):
    """The connection to one process. Guards: ``_is_waiting`` while what it was given is not answered."""

    def __init__(
        self, name: str, versions: Mapping[Api, int], on_lost: Callable[[], None], chance: Chance, story: Story
    ) -> None:
        super().__init__(name, versions, chance, story)
        self._on_lost: Final = on_lost

    def put(self, asked: Asked) -> None:
        """Send a request."""
        self._ask(asked.api, asked.then, **asked.fields)

    @property
    def is_owed(self) -> bool:
        """Whether an answer is to come."""
        return self._is_waiting

    def disconnected(self) -> None:
        """The connection is gone."""
        was_owed = self._is_waiting
        super().disconnected()
        if was_owed:
            self._on_lost()

    def _step(self) -> None:
        """It sends what it is given."""


class ShardsTransactor(Transactor):
    """Guards: ``_pending`` is the request that is not answered, whether it was sent or not."""

    moves = True

    def __init__(
        self,
        ledger: Ledger,
        chance: Chance,
        story: Story,
        *,
        name: str,
        id_: str,
        owner: Owner,
        dialect: int,
        timeout_ms: int,
        home: Callable[[str], int],
        places: Mapping[str, int],
        count: int,
    ) -> None:
        """dialect: of ``DIALECTS``. home: where an id or a group is. places: where topics are. count: of shards."""
        versions = DIALECTS[dialect]
        super().__init__(
            ledger, chance, story, name=name, id_=id_, owner=owner, versions=versions, timeout_ms=timeout_ms
        )
        self._home: Final = home
        self._places: Final = places
        self._pending: Asked | None = None
        self.mouths: Final = [Mouth(name, versions, self._lost, chance, story) for _ in range(count)]

    @property
    def owner(self) -> Owner:
        """Whose position it moves."""
        return self._owner

    @property
    def wants(self) -> int | None:
        """The shard whose process it wants to be connected to, None where it has what it wants."""
        pending = self._pending
        return None if pending is None or self.mouths[pending.shard].link is not None else pending.shard

    def connected_to(self, shard: int, link: Link) -> None:
        """There is a connection to the process of a shard."""
        self.mouths[shard].connected(link)

    def go_on(self) -> None:
        """Ask for the next thing, or send what did not fit."""
        pending = self._pending
        if pending is None:
            self._step()
            return
        mouth = self.mouths[pending.shard]
        if mouth.is_owed:
            mouth.go_on()
        elif mouth.link is not None and not mouth.link.is_cut:
            mouth.put(pending)

    def _ask(self, api: Api, then: Then, /, **fields: Any) -> None:
        def reported(body: Any) -> None:
            self._pending = None
            if error_of(body) in AGAIN and self._chance.happens(REPEATS):
                self._ask(api, then, **fields)
            else:
                then(body)

        self._count += 1  # its values are told apart by that
        if api is Api.OFFSET_FETCH:
            fields["require_stable"] = True
        self._pending = Asked(api, reported, fields, self._shard_of(api, fields))

    def _shard_of(self, api: Api, fields: Mapping[str, Any]) -> int:
        if api is Api.PRODUCE:
            return self._places[fields["topics"][0].name]
        if api in (Api.TXN_OFFSET_COMMIT, Api.OFFSET_FETCH):
            return self._home(fields["group_id"])
        return self._home(fields["transactional_id"])

    def _lost(self) -> None:
        """What was asked for is answered no more: it asks again, or is another client from now on, which begins anew."""
        if not self._chance.happens(REPEATS):
            self.forget()

    def forget(self) -> None:
        """Begin anew, which ends what is open."""
        self._pending = self._producer = self._transaction = None

    @property
    def is_idle(self) -> bool:
        """Whether it waits for nothing, and has nothing open."""
        return self._pending is None and self._transaction is None
