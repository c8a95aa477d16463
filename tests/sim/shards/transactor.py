"""A Kafka transaction client over several shards, which looks up leaders and coordinators, and retries.

It has at most one pending request, whichever process it is for.
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
"""Versions of requests: with explicitly added partitions, and with an epoch per transaction."""
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
"""Errors that clients retry."""
REPEATS: Final = 0.7  # of unanswered requests, or those refused temporarily


class Asked(NamedTuple):
    """A pending request. shard: its process."""

    api: Api
    then: Then
    fields: Mapping[str, Any]
    shard: int


class Mouth(LoneKafkaPeer):
    """The connection to one process. Guards: ``_is_waiting`` while a response is pending."""

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
        """Return whether a response is pending."""
        return self._is_waiting

    def disconnected(self) -> None:
        """Note the loss of the connection."""
        was_owed = self._is_waiting
        super().disconnected()
        if was_owed:
            self._on_lost()

    def _step(self) -> None:
        """Send the request."""


class ShardsTransactor(Transactor):
    """Guards: ``_pending`` is the unanswered request, sent or not."""

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
        """dialect: of ``DIALECTS``. home: maps a name to its coordinator's shard. places: shards by topic."""
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
        """The owner of the offset that it commits."""
        return self._owner

    @property
    def wants(self) -> int | None:
        """The shard to connect to next, None if it has the connections it needs."""
        pending = self._pending
        return None if pending is None or self.mouths[pending.shard].link is not None else pending.shard

    def connected_to(self, shard: int, link: Link) -> None:
        """Note a connection to the process of a shard."""
        self.mouths[shard].connected(link)

    def go_on(self) -> None:
        """Make the next request, or send the rest of the last one."""
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

        self._count += 1  # which distinguishes its values
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
        """Handle a lost request: repeat it, or start again as another client."""
        if not self._chance.happens(REPEATS):
            self.forget()

    def forget(self) -> None:
        """Start again, which aborts the open transaction."""
        self._pending = self._producer = self._transaction = None

    @property
    def is_idle(self) -> bool:
        """Return whether it has no pending request and no open transaction."""
        return self._pending is None and self._transaction is None
