"""Owned state is refused to other users: transactional ids, writers, staged tokens, groups, offsets, producers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polywire.broker.access import ROOT, ConfiguredUser, Principal
from polywire.broker.authorization import AuditEvent, Outcome
from polywire.broker.owners import ITSELF, NO_CALLER, UNOWNED, Caller, caller_of, next_owner, owner_of_address
from polywire.broker.permissions import parse_grants
from polywire.broker.settings import BrokerSettings
from polywire.broker.staging import PublishAnswer
from polywire.broker.state import State
from polywire.errors import BrokerError, Denied, ErrorCode, Invalid
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, PositionKind
from tests.unit.broker.answers import Answers, batch_by, batch_of

A, B = b"a" * 16, b"b" * 16
USERS = ("alice", "bob")
LAST_NUMBER = 2**63 - 1


def guard(memory: MemoryBroker) -> None:
    """Add users to the broker, one of whom may manage servers."""
    words = ("produce", "consume", "group", "transaction")
    users = [ConfiguredUser(name, "", parse_grants(words)) for name in USERS]
    memory.broker.access.configure([*users, ConfiguredUser("root", "", parse_grants(["admin"]))])
    memory.run()


def user(memory: MemoryBroker, name: str) -> Caller:
    found = memory.broker.access.user(name)
    return caller_of(Principal(found.id, name), "10.0.0.1:5")


@pytest.fixture
def guarded() -> MemoryBroker:
    memory = MemoryBroker()
    memory.broker.ensure_topic("t")
    guard(memory)
    return memory


def stage(memory: MemoryBroker, by: Caller, token: bytes, write: tuple[str, int] = ("w", 1)) -> None:
    partition = memory.broker.ensure_topic("t").partitions[0]
    memory.broker.stage(token, partition, batch_of(b"v"), write=write, by=by, level=Level.WRITTEN, done=Answers())
    memory.run()


def publish(memory: MemoryBroker, by: Caller, number: int, *tokens: bytes) -> PublishAnswer:
    reported: list[PublishAnswer | BrokerError] = []
    memory.broker.publish("w", number, tokens, by=by, done=reported.append)
    memory.run()
    (answer,) = reported
    assert isinstance(answer, PublishAnswer)
    return answer


Verb = Callable[[MemoryBroker, Caller], object]


def _join(memory: MemoryBroker, by: Caller) -> object:
    return memory.broker.groups.join("g", "t", "stranger", wire="polywire", by=by)


def _produce(memory: MemoryBroker, by: Caller) -> object:
    partition = memory.broker.topic("t").partitions[0]
    batch = batch_by(b"p", 2**62, 0)
    memory.broker.produce(partition, batch, by=by, level=Level.WRITTEN, done=None)
    return None


VERBS: dict[str, Verb] = {
    "fence": lambda m, by: m.broker.transactions.begin_epoch("x", by=by, done=None),
    "publish": lambda m, by: m.broker.publish("w", 2, [], by=by, done=None),
    "publish the last number": lambda m, by: m.broker.publish("w", LAST_NUMBER, [], by=by, done=None),
    "publish a token": lambda m, by: m.broker.publish("other", 1, [B], by=by, done=None),
    "abandon": lambda m, by: m.broker.abandon([B], by=by),
    "stage under a token": lambda m, by: stage(m, by, B, ("", 0)),
    "stage for a writer": lambda m, by: stage(m, by, b"c" * 16),
    "join": _join,
    "heartbeat": lambda m, by: m.broker.groups.heartbeat("g", "t", "m", None, wire="flux", by=by),
    "sync": lambda m, by: m.broker.groups.sync("g", "t", "m", 2, wire="flux", by=by),
    "leave": lambda m, by: m.broker.groups.leave("g", "t", "m", None, wire="flux", by=by),
    "commit": lambda m, by: m.broker.groups.commit("g", "t", "m", 2, 0, 9, wire="flux", by=by),
    "delete group": lambda m, by: m.broker.groups.delete("g", "t", by=by),
    "bind group": lambda m, by: m.broker.groups.bind("flux", "g", "u", by=by),
    "switch group": lambda m, by: m.broker.groups.join("g", "u", "n", wire="flux", named_alone=True, by=by),
    "set position": lambda m, by: m.broker.commit_position("t", 0, PositionKind.GROUP, "g", 7, by=by),
    "set position alone": lambda m, by: m.broker.commit_position("t", 0, PositionKind.GROUP, "alone", 7, by=by),
    "make group over positions": lambda m, by: m.broker.groups.create("alone", "t", by=by),
    "forget positions": lambda m, by: m.broker.delete_positions(PositionKind.GROUP, "alone", by=by),
    "fence producer": _produce,
}


def fill(memory: MemoryBroker, by: Caller) -> None:
    """Create one of everything that can have an owner."""
    broker = memory.broker
    broker.transactions.begin_epoch("x", by=by, done=None)
    stage(memory, by, A)
    publish(memory, by, 1, A)
    stage(memory, by, B, ("w", 2))
    broker.groups.join("g", "t", "m", wire="flux", named_alone=True, connected=True, by=by)
    broker.commit_position("t", 0, PositionKind.GROUP, "alone", 5, by=by)
    batch = batch_by(b"p", 1, 0)
    broker.produce(broker.topic("t").partitions[0], batch, by=by, level=Level.WRITTEN, done=None)
    memory.run()


def test_refusals_are_audited_with_the_owner(guarded: MemoryBroker) -> None:
    fill(guarded, user(guarded, "alice"))
    audited: list[AuditEvent] = []
    guarded.broker.access.audit = audited.append
    for stranger in (user(guarded, "bob"), NO_CALLER):
        with pytest.raises(Denied):
            VERBS["join"](guarded, stranger)
    (event,) = audited
    assert (event.action, event.outcome, event.user, event.resource) == ("group.use", Outcome.REFUSED, "bob", "g")
    assert event.reason.endswith("it belongs to another user (ask an administrator) owner='alice'")


def test_lists_of_share_groups_omit_those_of_others_without_an_audit_event(guarded: MemoryBroker) -> None:
    directory = guarded.broker.shares.directory
    directory.create("workers", user(guarded, "alice"))
    guarded.run()
    audited: list[AuditEvent] = []
    guarded.broker.access.audit = audited.append
    assert directory.names(by=user(guarded, "alice")) == ["workers"]
    assert directory.names(by=user(guarded, "bob")) == []
    assert not directory.exists("workers", by=user(guarded, "bob"))
    assert audited == []


@pytest.mark.parametrize("verb", VERBS)
def test_other_users_are_refused(guarded: MemoryBroker, verb: str) -> None:
    fill(guarded, user(guarded, "alice"))
    before = guarded.broker._state.snapshot()
    for stranger in (user(guarded, "bob"), NO_CALLER, caller_of(None, "10.0.0.9:1")):
        with pytest.raises(Denied) as caught:
            VERBS[verb](guarded, stranger)
        assert caught.value.code is ErrorCode.DENIED
        assert "alice" not in caught.value.message
    guarded.run()
    assert guarded.broker._state.snapshot() == before
    assert publish(guarded, user(guarded, "alice"), 2, B).duplicate is False


def test_a_transactional_id_of_another_user_looks_missing(guarded: MemoryBroker) -> None:
    fill(guarded, user(guarded, "alice"))
    find = guarded.broker.transactions.find
    assert find("x", by=user(guarded, "bob")) is find("x", by=NO_CALLER) is None
    assert find("x", by=user(guarded, "alice")) is find("x", by=user(guarded, "root")) is not None


@pytest.mark.parametrize("verb", VERBS)
def test_the_owner_an_administrator_and_any_client_of_an_open_broker_are_allowed(
    memory: MemoryBroker, verb: str
) -> None:
    if verb == "publish the last number":
        return  # refused for every user
    guard(memory)
    fill(memory, user(memory, "alice"))
    VERBS[verb](memory, user(memory, "alice"))
    for administrator in (user(memory, "root"), ITSELF):
        memory = MemoryBroker()
        guard(memory)
        fill(memory, user(memory, "alice"))
        VERBS[verb](memory, administrator)
    memory = MemoryBroker()
    fill(memory, caller_of(ROOT, "10.0.0.1:5"))
    VERBS[verb](memory, caller_of(ROOT, "10.0.0.2:5"))


@pytest.mark.parametrize("verb", [verb for verb in VERBS if "token" not in verb and verb != "abandon"])
def test_owners_survive_a_restart(guarded: MemoryBroker, verb: str) -> None:
    fill(guarded, user(guarded, "alice"))
    snapshot = guarded.broker._state.snapshot()
    again = State(guarded.settings)
    again.restore(snapshot)
    assert again.snapshot() == snapshot
    guarded.restart()
    if verb != "fence producer":  # recovered from batches, which do not record their owner
        with pytest.raises(Denied):
            VERBS[verb](guarded, user(guarded, "bob"))


def test_use_by_an_administrator_does_not_change_the_owner(guarded: MemoryBroker) -> None:
    fill(guarded, user(guarded, "alice"))
    guarded.broker.transactions.begin_epoch("x", by=user(guarded, "root"), done=None)
    publish(guarded, user(guarded, "root"), 2)
    _join(guarded, user(guarded, "root"))
    for verb in ("fence", "publish", "join"):
        with pytest.raises(Denied):
            VERBS[verb](guarded, user(guarded, "bob"))
    assert guarded.broker.transactions.begin_epoch("x", by=user(guarded, "alice"), done=None).epoch == 2


def test_unowned_state_belongs_to_the_first_user_who_uses_it(memory: MemoryBroker) -> None:
    fill(memory, NO_CALLER)
    guard(memory)
    _join(memory, user(memory, "bob"))
    memory.broker.transactions.begin_epoch("x", by=user(memory, "bob"), done=None)
    for verb in ("join", "fence"):
        with pytest.raises(Denied):
            VERBS[verb](memory, user(memory, "alice"))
    publish(memory, user(memory, "alice"), 2, B)
    with pytest.raises(Denied):
        publish(memory, user(memory, "bob"), 3)


def test_offsets_of_consumers_without_a_group_have_no_owner(guarded: MemoryBroker) -> None:
    for name in USERS:
        guarded.broker.commit_position("t", 0, PositionKind.CONSUMER, "1", 3, by=user(guarded, name))
    guarded.run()


def test_a_number_far_ahead_is_refused_and_the_owners_batch_is_stored(memory: MemoryBroker) -> None:
    assert not publish(memory, NO_CALLER, 7).duplicate  # the first number is free
    stage(memory, NO_CALLER, A, ("w", 8))
    step = BrokerSettings().writer_step_max
    for number in (LAST_NUMBER, 7 + step + 1):
        with pytest.raises(Invalid) as caught:
            memory.broker.publish("w", number, [], done=None)
        assert caught.value.code is ErrorCode.SEQUENCE_GAP
    assert not publish(memory, NO_CALLER, 8, A).duplicate
    assert not publish(memory, NO_CALLER, 8 + step).duplicate


def test_a_new_epoch_restarts_the_sequence(memory: MemoryBroker) -> None:
    partition = memory.broker.ensure_topic("t").partitions[0]

    def produce(epoch: int, base: int) -> None:
        memory.broker.produce(partition, batch_by(b"p", epoch, base), level=Level.WRITTEN, done=None)

    produce(1, 40)  # an unknown producer may start anywhere: it may have been forgotten
    produce(1, 41)
    with pytest.raises(Invalid) as caught:
        produce(2, 42)
    assert caught.value.code is ErrorCode.SEQUENCE_GAP
    produce(2, 1)
    produce(2, 2)
    produce(3, 0)


def test_addresses_are_distinguished_by_their_networks() -> None:
    one = owner_of_address("10.0.0.1:80")
    assert one == owner_of_address("10.0.0.1:90") == owner_of_address("::ffff:10.0.0.1:90") < UNOWNED
    assert one != owner_of_address("10.0.0.2:80")
    assert owner_of_address("2001:db8::1:5") == owner_of_address("2001:db8::2:77")
    assert owner_of_address("2001:db8::1:5") != owner_of_address("2001:db8:0:1::1:5")
    assert owner_of_address("unix") == owner_of_address("unix") < UNOWNED


def test_ownership_passes_to_the_first_user_or_address() -> None:
    someone, address = Caller(None, 7), Caller(None, -5)
    assert next_owner(UNOWNED, NO_CALLER) == UNOWNED
    assert next_owner(UNOWNED, address) == -5
    assert next_owner(-9, address) == -9
    assert next_owner(-9, someone) == next_owner(UNOWNED, someone) == next_owner(7, address) == 7
