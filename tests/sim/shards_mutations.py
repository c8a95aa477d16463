"""Mechanisms of transactions over several shards, with a switch that disables one in the simulation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

import msgspec
import pytest

from polywire.broker import transactions as broker_transactions
from polywire.broker.access import Access
from polywire.broker.changes import TransactionDecided
from polywire.broker.participants import AGAIN_S, Joined, Participants
from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Topic
from polywire.broker.transaction_state import Transaction, TransactionTable
from polywire.broker.transactions import Transactions
from polywire.log.base import Completion
from polywire.protocols.cursus import produce as producing
from polywire.protocols.cursus import transactions as cursus_transactions
from polywire.protocols.flux.routed import ForwardedBatches, ForwardedFluxSession, RoutedFluxSession
from polywire.protocols.flux.session import FluxSession
from polywire.protocols.iggy import factory as iggy_factory
from polywire.protocols.iggy.directory import StoredTopic
from polywire.protocols.iggy.routed import FUNCTIONS, RoutedDirectory
from polywire.protocols.kafka import transactions as kafka_transactions
from polywire.protocols.kafka.fences import Fences
from polywire.routing.bindings import Bindings
from polywire.routing.broker import RoutedBroker
from polywire.routing.link import ShardLink
from polywire.routing.messages import Appended, Empty, Verb
from polywire.routing.session import COMMANDS, LinkSession
from polywire.routing.values import Subscribers
from polywire.types import Level
from tests.sim.mutation import Mutation, nothing, prepared, replaced, wrapped
from tests.unit.broker import test_participants as broker_participants
from tests.unit.protocols.cursus import test_processes as cursus_processes
from tests.unit.protocols.flux import test_processes as flux_processes
from tests.unit.protocols.iggy import test_processes as iggy_processes
from tests.unit.protocols.iggy.sharded import MemoryShards, make_shards
from tests.unit.protocols.kafka import test_participants, test_processes, test_transactions_of_processes
from tests.unit.protocols.kafka.test_processes import TOPICS, Processes
from tests.unit.routing import test_parts, test_router, test_users
from tests.unit.routing.test_router import Together

ShardsMutation: Final = partial(Mutation, world="shards")


def _unknown_branch(
    participants: Participants, transaction: Transaction, shards: Collection[int], *, done: Any
) -> None:
    """Let a shard join a transaction without recording it at the coordinator."""
    participants._log.barrier(Level.SYNCED, done)


def _reported_early(participants: Participants) -> None:
    """Send a decision before it is synced."""
    for token, decided in participants._state.transactions.decisions.items():
        if token not in participants._in_flight:
            participants._in_flight[token] = set(decided.shards)
            participants._loop.call_soon(participants._decision_written, decided, 0)


def _followed_early(
    old: Callable[..., None], participants: Participants, decided: TransactionDecided, *args: Any
) -> None:
    """Count a shard without a response as having followed."""
    old(participants, decided, *args[:-1], True)


def _over_in_time(transactions: Transactions, transaction: Transaction) -> bool:
    """Give a participant its producer's timeout."""
    producer = transaction.producer
    if not transaction.is_open or producer is None or transaction.id in transactions._endings:
        return False
    return transactions._clock.now_us() >= transaction.began_at_us + producer.timeout_us


def _ended_as_known(participants: Participants, id_: str, token: bytes, *, commits: bool, done: Any) -> None:
    """Apply an end to any participant open under the id."""
    participant = participants.find(id_)
    _END(participants, id_, token if participant is None else participant.token, commits=commits, done=done)


_END: Final = Participants.end


def _ended_unsynced(participants: Participants, id_: str, token: bytes, *, commits: bool, done: Any) -> None:
    """Report that a shard has followed before that is synced."""
    _END(participants, id_, token, commits=commits, done=nothing)
    participants._loop.call_soon(done, 0)


def _outcome_as_aborted(participants: Participants, id_: str, token: bytes, then: Callable[..., None]) -> None:
    """Let the coordinator report open transactions as aborted."""
    decided = participants._state.transactions.decisions.get(token)
    participants._loop.call_soon(then, decided is not None and decided.commits)


def _without_decisions(old: Callable[..., None], table: TransactionTable, states: Any, decisions: Any = ()) -> None:
    """Leave decisions out of snapshots."""
    old(table, states)


def _entered_as_new(old: Callable[..., Transaction], participants: Participants, joined: Joined) -> Transaction:
    """Start a new participant with each permission."""
    known = participants.find(joined.id)
    if known is not None and known.is_open and known.token == joined.token:
        participants._transactions.abort(known, done=None)
    return old(participants, joined)


def _reported_once(participants: Participants, decided: TransactionDecided, shard: int, again_s: float) -> None:
    """Send a shard the decision of a transaction only once."""
    if participants._shards is not None and not participants._is_stopped and again_s == AGAIN_S:
        participants._shards.end_participant(
            shard, decided, partial(participants._decision_applied, decided, shard, again_s)
        )


def _lost_as_stored(old: Callable[..., None], link: ShardLink) -> None:
    """Answer the calls of a lost link as if their records had been stored."""
    calls = [call for call in link._calls.values() if call.size]
    link._calls.clear()
    old(link)
    for call in calls:
        call.on_response(msgspec.msgpack.encode(Appended(0)), memoryview(b""))


def _left_lost(old: Callable[..., None], link: ShardLink) -> None:
    """Do not open a lost link again."""
    lost = link._link
    old(link)
    if link._retry is not None:
        link._retry.cancel()
    link._link = lost


def _queued_alone(session: ForwardedFluxSession, waiting: ForwardedBatches, *args: Any) -> None:
    """Let batches of each forwarded run wait in a queue of their own."""
    FluxSession.__init__(session, *args)
    session._sessions = waiting.sessions  # type: ignore[misc]
    session._sessions[session] = None


def _credited_at_once(session: RoutedFluxSession) -> None:
    """Report that the client has taken what was sent to it."""
    if session._call is not None:
        session._call.credit(session._uncredited)
        session._uncredited = 0


def _at_once(_: Subscribers, then: Callable[[], None]) -> None:
    then()


def _without_delay(*_: object) -> Callable[[], None]:
    return nothing


def _unreported(_: object, session: LinkSession, correlation: int, *__: object) -> None:
    """Answer before the state of the topic is sent."""
    session._respond(correlation, Empty())


def _overtaking(old: Callable[..., None], session: LinkSession, correlation: int, head: Any, batch: memoryview) -> None:
    """Append a batch although earlier ones of its partition wait."""
    waiting, session._waiting = session._waiting, {}
    old(session, correlation, head, batch)
    session._waiting |= waiting


def _processes() -> Processes:
    made = Processes()
    made.make(*TOPICS)
    return made


def _iggy() -> MemoryShards:
    return make_shards(3, dialect=iggy_processes.D2)


def _changed_as_known(
    own: Any, topic: Topic, kept: StoredTopic, settings: TopicSettings, done: Completion[int]
) -> None:
    """Store a topic of the Iggy protocol as the other process knows it."""
    own.update_topic(topic, kept, settings, done)


_changed_as_known.__name__ = "change_topic"  # by which other processes call it


def commanded(verb: Verb, instead: Callable[..., None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a switch that replaces the handler of a call over a link; ``instead`` gets the old one first."""
    old = COMMANDS[verb]
    return lambda patch: patch.setitem(COMMANDS, verb, partial(instead, old))


SHARDS_MUTATIONS: Final = (
    ShardsMutation(
        "branch-known",
        "coordinator knows a participant before it begins",
        replaced(Participants, "join", _unknown_branch),
    ),
    ShardsMutation(
        "branch-begins",
        "a shard does not open a participant by itself",
        replaced(kafka_transactions, "check_begun", nothing),
        test=prepared(test_participants.test_a_shard_does_not_open_a_participant_by_itself, processes=_processes),
    ),
    ShardsMutation(
        "decision-synced",
        "a decision is synced before it is sent",
        replaced(Participants, "_send_decisions", _reported_early),
        test=prepared(broker_participants.test_a_decision_is_sent_once_it_is_stored, fails=lambda: True),
    ),
    ShardsMutation(
        "decision-snapshot", "decisions are in snapshots", wrapped(TransactionTable, "restore", _without_decisions)
    ),
    ShardsMutation(
        "all-followed",
        "a decision is kept until all have followed",
        wrapped(Participants, "_decision_applied", _followed_early),
    ),
    ShardsMutation(
        "following-synced", "a shard has followed once that is synced", replaced(Participants, "end", _ended_unsynced)
    ),
    ShardsMutation(
        "branch-staged",
        "what several shards have parts of is synced",
        replaced(broker_transactions, "level_of", lambda *_: Level.WRITTEN),
    ),
    ShardsMutation(
        "branch-time", "a participant never ends by itself", replaced(Transactions, "_has_timed_out", _over_in_time)
    ),
    ShardsMutation(
        "branch-asks",
        "what is open at the coordinator is not said to have aborted",
        replaced(Participants, "outcome", _outcome_as_aborted),
    ),
    ShardsMutation(
        "branch-looks",
        "a participant asks its coordinator",
        replaced(Participants, "_ask_coordinators", nothing),
        test=prepared(
            test_transactions_of_processes.test_a_participant_unknown_to_its_coordinator_is_aborted,
            processes=_processes,
        ),
    ),
    ShardsMutation(
        "branch-token",
        "an end is of one transaction",
        replaced(Participants, "end", _ended_as_known),
        test=prepared(test_participants.test_a_late_end_does_not_end_the_next_transaction, processes=_processes),
    ),
    ShardsMutation(
        "branch-goes-on",
        "a permission that comes again changes nothing",
        wrapped(Participants, "enter", _entered_as_new),
    ),
    ShardsMutation(
        "settled-first",
        "the next transaction waits until all have followed",
        replaced(Participants, "is_deciding", lambda *_: False),
        first=4,
    ),
    ShardsMutation(
        "told-again",
        "a shard that did not follow is notified again",
        replaced(Participants, "_send_decision", _reported_once),
        first=19,
    ),
    ShardsMutation(
        "ended-tokens",
        "a permission later than the end opens nothing",
        replaced(Participants, "_remember_ended", nothing),
        test=prepared(test_participants.test_a_late_permission_after_the_end_opens_nothing, processes=_processes),
    ),
    ShardsMutation(
        "lines-order",
        "forwarded lines stay in order when the log is full",
        replaced(ForwardedFluxSession, "__init__", _queued_alone),
        test=prepared(flux_processes.test_lines_stay_in_order_when_the_log_of_another_process_is_full),
    ),
    ShardsMutation(
        "pieces-taken",
        "a process sends no more of a response than the client takes",
        replaced(RoutedFluxSession, "_credit", _credited_at_once),
        test=flux_processes.test_an_unread_long_response_is_held_by_no_process,
    ),
    ShardsMutation(
        "links-anew",
        "a lost link is replaced",
        wrapped(ShardLink, "lost", _left_lost),
        test=prepared(test_router.test_a_link_is_opened_again, together=Together),
    ),
    ShardsMutation(
        "generation-fence",
        "no position comes behind a later generation's",
        replaced(Fences, "check", nothing),
        test=prepared(test_processes.test_a_delayed_commit_does_not_overwrite_a_later_one, processes=_processes),
    ),
    ShardsMutation(
        "link-lost",
        "calls of a lost link fail",
        wrapped(ShardLink, "lost", _lost_as_stored),
        test=prepared(test_router.test_a_lost_process_answers_nothing, together=Together),
    ),
    ShardsMutation(
        "link-order",
        "batches of a partition are appended in the order of a link",
        commanded(Verb.PRODUCE, _overtaking),
        test=prepared(test_router.test_batches_of_a_partition_stay_in_order_when_the_log_is_full, together=Together),
    ),
    ShardsMutation(
        "bindings-known",
        "a group name has one topic in all processes",
        replaced(Bindings, "apply", nothing),
        test=cursus_processes.test_a_group_name_has_one_topic_in_all_processes,
    ),
    ShardsMutation(
        "users-applied",
        "a change of a user completes when all processes have applied it",
        replaced(Subscribers, "when_applied", _at_once),
        test=prepared(test_users.test_many_changes_in_a_row_wait_each_for_its_own, processes=test_users.Processes),
    ),
    ShardsMutation(
        "users-notified",
        "the connections of a user are closed after the response to its change",
        replaced(Access, "begin_change", _without_delay),
        test=prepared(
            test_users.test_logins_end_everywhere_and_connections_are_notified_after_the_response,
            processes=test_users.Processes,
        ),
    ),
    ShardsMutation(
        "link-topics",
        "the state of a topic is sent before the answer that finds it",
        commanded(Verb.FIND, _unreported),
        test=prepared(test_router.test_a_topic_is_found_before_all_are_reported, together=Together),
    ),
    ShardsMutation(
        "link-values",
        "values of the first shard are sent before the answer to the call that changes them",
        replaced(LinkSession, "_value_changed", nothing),
        test=prepared(iggy_processes.test_streams_and_topics_have_the_same_ids_everywhere, shards=_iggy),
    ),
    ShardsMutation(
        "same-epochs",
        "a new epoch of a transactional id is above its epochs in all shards",
        replaced(cursus_transactions, "_epoch_min", lambda *_: 0),
        test=cursus_processes.test_a_new_epoch_is_above_those_of_every_shard,
    ),
    ShardsMutation(
        "checked-members",
        "each participant checks members again before a transaction is committed",
        replaced(cursus_transactions, "_check_member", nothing),
        test=prepared(
            cursus_processes.test_the_generation_of_a_member_is_checked_again_at_the_commit, topic=lambda: "b"
        ),
    ),
    ShardsMutation(
        "lost-writes",
        "a connection is closed if a process has ended before it confirmed a write",
        replaced(producing, "close_if_lost", nothing),
        test=cursus_processes.test_a_lost_process_closes_connections_with_pending_writes,
    ),
    ShardsMutation(
        "link-reports",
        "requests wait for topics that processes have yet to report",
        replaced(RoutedBroker, "require_reported", nothing),
        test=test_parts.test_topics_are_awaited_until_every_process_has_reported_them,
    ),
    ShardsMutation(
        "link-bounds",
        "offsets of another process are requested before they are used",
        replaced(RoutedBroker, "require_current", nothing),
        test=prepared(test_parts.test_the_state_of_many_partitions, together=test_parts.Parted, chunk=lambda: 3),
    ),
    ShardsMutation(
        "link-numbers",
        "the process of a topic assigns a number to it",
        replaced(RoutedDirectory, "_require", nothing),
        test=prepared(iggy_processes.test_topics_of_other_protocols_are_in_their_streams, shards=_iggy),
    ),
    ShardsMutation(
        "link-groups",
        "a change of a topic keeps what its process has changed meanwhile",
        replaced(iggy_factory, "FUNCTIONS", (*FUNCTIONS, _changed_as_known)),
        test=prepared(iggy_processes.test_a_changed_topic_keeps_groups_that_were_created_meanwhile, shards=_iggy),
    ),
)
