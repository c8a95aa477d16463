"""Calls between the coordinator of a transactional id and the participants of its transactions (decision 0129)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from polywire.broker.changes import TransactionDecided
from polywire.broker.participants import Participants
from polywire.broker.transaction_state import PARTICIPANT, Transaction
from polywire.errors import BrokerError
from polywire.log.base import Loop
from polywire.routing.calls import Method, Router

END: Final = Method("participants.end", Participants.end)
JOIN_EPOCH: Final = Method("participants.join_epoch", Participants.join_epoch)
OUTCOME: Final = Method("participants.outcome", Participants.outcome)
METHODS: Final = (END, JOIN_EPOCH, OUTCOME)


class ParticipantCalls:
    """Sends decisions on transactions, and questions about them, to other processes.

    Implements ``broker.participants.Shards``.
    """

    def __init__(self, router: Router, loop: Loop) -> None:
        self._router: Final = router
        self._loop: Final = loop

    def end_participant(self, shard: int, decided: TransactionDecided, then: Callable[[bool], None]) -> None:
        """Send the decision on a transaction to a participating shard.

        ``then`` is called with whether it was applied.
        """

        def ended(result: int | BrokerError) -> None:
            then(not isinstance(result, BrokerError))

        self._call(shard, END, (decided.id, decided.token), {"commits": decided.commits, "done": ended}, ended)

    def ask_coordinator(self, participant: Transaction, then: Callable[[bool | None], None]) -> None:
        """Ask the coordinator of a transaction for its outcome.

        ``then`` is called with None if it is open or unknown.
        """

        def on_outcome(commits: bool | BrokerError | None) -> None:
            then(None if isinstance(commits, BrokerError) else commits)

        id_ = participant.id.removeprefix(PARTICIPANT)
        self._call(participant.coordinator, OUTCOME, (id_, participant.token), {"then": on_outcome}, on_outcome)

    def _call(
        self,
        shard: int,
        method: Method,
        values: Sequence[Any],
        options: Mapping[str, Any],
        on_error: Callable[[BrokerError], None],
    ) -> None:
        try:
            self._router.call(shard, method, values, options)
        except BrokerError as error:  # too many bytes wait for responses of the other process
            self._loop.call_soon(on_error, error)
