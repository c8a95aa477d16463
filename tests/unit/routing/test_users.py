"""Users of several processes: the first one changes them, and all know them before the response."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from polywire.broker.access import REPLICATED, Access, ConfiguredUser, Principal, User
from polywire.broker.broker import Broker
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING, Action, parse_grants
from polywire.broker.scram import Mechanism, make_verifier
from polywire.broker.settings import BrokerSettings
from polywire.errors import BrokerError, Conflict, Denied, ErrorCode, Invalid, Missing, Unavailable
from polywire.log.base import Completion
from polywire.protocols.runtime.shards import LinkPeer
from polywire.routing.broker import RoutedBroker
from polywire.routing.link import RETRY_S
from polywire.routing.session import RouterFactory
from polywire.routing.values import APPLIED_S, Values
from tests.unit.protocols.shards_in_memory import KEY, MemoryLink, MemoryShards

COUNT: Final = 3
WAIT_S: Final = 20.0
HASH: Final = hash_password("wonderland")
ALICE: Final = ConfiguredUser("alice", HASH, EVERYTHING)


class Processes:
    """Processes in memory. Those of ``lost`` cannot be reached."""

    def __init__(self) -> None:
        self.shards = MemoryShards(lambda broker: RouterFactory(broker, KEY), COUNT)
        self.lost: set[int] = set()
        self.links: dict[tuple[int, int], MemoryLink] = {}
        self.routed = [RoutedBroker(broker, Seen(self, own)) for own, broker in enumerate(self.shards.brokers)]
        self.run()

    def run(self, seconds: float = 0) -> None:
        self.shards.loop.clock.advance(seconds)
        for _ in range(20):
            for broker in self.shards.brokers:
                broker.commit()
            self.shards.loop.run_due()

    def access(self, own: int) -> Access:
        return self.shards.brokers[own].access

    def start(self, own: int, change: Callable[[Access, Completion[Any]], object]) -> list[Any]:
        """Start a change over a process, and return the list of its results."""
        results: list[Any] = []
        change(self.routed[own].users, results.append)
        return results

    def result(self, own: int, change: Callable[[Access, Completion[Any]], object]) -> Any:
        """Return the result of a change. All processes have applied it. Raises its error."""
        results: list[Any] = []

        def done(result: Any) -> None:
            assert len({self.stored(number) for number in range(COUNT)}) == 1
            results.append(result)

        change(self.routed[own].users, done)
        self.until(lambda: bool(results))
        [result] = results
        if isinstance(result, BrokerError):
            raise result
        return result

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < end, "passwords are hashed in a thread"
            time.sleep(0.001)
            self.run()

    def stored(self, own: int) -> tuple[object, ...]:
        """Return what a process has stored of the users."""
        broker = self.shards.brokers[own]
        return tuple(tuple(sorted(broker.wire_state(wire).items())) for wire in REPLICATED)

    def create(self, own: int, name: str = "bob", words: str = "") -> User:
        grants = parse_grants(words.split()) if words else None
        made: User = self.result(own, lambda users, done: users.create_user(name, "secret", grants, done=done))
        return made

    def lose(self, shard: int) -> None:
        """End the process of a shard."""
        self.lost.add(shard)
        for (_, to), link in list(self.links.items()):
            if to == shard:
                link.break_off()
        for (own, to), link in list(self.links.items()):
            if own == shard and to not in self.lost:
                link.close()


class Seen:
    """The shards as one process sees them."""

    def __init__(self, processes: Processes, own: int) -> None:
        self._processes = processes
        self.own = own
        self.count, self.key = COUNT, KEY
        self.shard_of, self.shard_by_hash = processes.shards.shard_of, processes.shards.shard_by_hash
        self.least_loaded = processes.shards.least_loaded

    def connect(self, shard: int, peer: LinkPeer) -> MemoryLink:
        link = self._processes.shards.connect(shard, peer)
        self._processes.links[self.own, shard] = link
        if shard in self._processes.lost:
            self._processes.shards.loop.call_soon(link.break_off)
        return link


@pytest.fixture
def processes() -> Processes:
    return Processes()


def token_login(processes: Processes, own: int, token: str) -> Principal:
    return processes.access(own).log_in_with_token(token)


@pytest.mark.parametrize("own", range(COUNT))
def test_every_change_over_any_process_is_known_to_all(processes: Processes, own: int) -> None:
    bob = processes.create(own, words="consume")
    assert [processes.access(number).user("bob") for number in range(COUNT)] == [bob] * COUNT

    def change(verb: Callable[[Access, User, Completion[Any]], object]) -> User:
        found: User = processes.result(own, lambda users, done: verb(users, processes.access(own).user(bob.id), done))
        assert found == processes.access(own).user(bob.id)
        return found

    everything = change(lambda users, user, done: users.grant(user, EVERYTHING, done=done))
    assert everything.grants == EVERYTHING
    tokens: list[str] = []
    change(lambda users, user, done: tokens.append(users.create_token(user, "t", None, by=None, done=done)))
    logins = [token_login(processes, number, tokens[0]) for number in range(COUNT)]
    change(lambda users, user, done: users.delete_token(user, "t", done=done))
    assert not any(processes.access(number).is_current(logins[number]) for number in range(COUNT))
    assert not change(lambda users, user, done: users.update_user(user, active=False, done=done)).active
    assert change(lambda users, user, done: users.update_user(user, name="rob", active=True, done=done)).name == "rob"
    was = change(lambda users, user, done: users.change_password(user, "secret", "second", done=done)).password_hash
    assert change(lambda users, user, done: users.reset_password(user, "third", done=done)).password_hash != was
    verifier = make_verifier("fourth", Mechanism.SHA_256)
    change(lambda users, user, done: users.set_verifiers(user.name, {Mechanism.SHA_256: verifier}, done=done))
    assert [processes.access(number).verifier("rob", Mechanism.SHA_256) for number in range(COUNT)] == [verifier] * 3
    processes.result(own, lambda users, done: users.delete_user(processes.access(own).user("rob"), done=done))
    assert not any(processes.access(number).find_user(bob.id) for number in range(COUNT))
    assert processes.create(own).id > bob.id, "ids are not reused"


def test_errors_are_those_of_one_process(processes: Processes) -> None:
    processes.access(0).configure([ALICE, ConfiguredUser("clerk", HASH, parse_grants(["manage_users"]))])
    processes.run()
    clerk = processes.access(2).vouched("clerk")
    bob = processes.create(1)

    def failed(change: Callable[[Access, Completion[Any]], object], own: int = 2) -> ErrorCode:
        with pytest.raises(BrokerError) as raised:
            processes.result(own, change)
        return raised.value.code

    alice = processes.access(2).user("alice")
    assert failed(lambda users, done: users.create_user("bob", "x", None, done=done)) is ErrorCode.USER_EXISTS
    assert failed(lambda users, done: users.create_user("\ud800", "x", None, done=done)) is ErrorCode.INVALID_NAME
    assert failed(lambda users, done: users.create_user("eve", "", None, done=done)) is ErrorCode.INVALID_REQUEST
    assert failed(lambda users, done: users.delete_user(alice, done=done)) is ErrorCode.DENIED
    assert failed(lambda users, done: users.grant(bob, EVERYTHING, by=clerk, done=done)) is ErrorCode.DENIED
    assert failed(lambda users, done: users.change_password(bob, "wrong", "x", done=done)) is ErrorCode.LOGIN_FAILED
    assert failed(lambda users, done: users.delete_token(bob, "t", done=done)) is ErrorCode.TOKEN_MISSING
    stale = processes.result(1, lambda users, done: users.delete_user(bob, done=done))
    assert failed(lambda users, done: users.grant(stale, None, done=done)) is ErrorCode.USER_MISSING
    assert not processes.access(2)._changing, "the connections of all users are notified of later changes"


def test_the_operator_that_makes_a_change_is_audited(processes: Processes) -> None:
    processes.access(0).configure([ALICE])
    processes.run()
    events: list[Any] = []
    processes.access(0).audit = events.append
    alice = Principal(processes.access(1).user("alice").id, "alice", peer="10.0.0.1:9")
    processes.result(1, lambda users, done: users.create_user("bob", "x", None, by=alice, done=done))
    assert [(event.action, event.user, event.peer, event.resource) for event in events] == [
        ("user.create", "alice", "10.0.0.1:9", "bob")
    ]


def test_logins_end_everywhere_and_connections_are_notified_after_the_response(processes: Processes) -> None:
    bob = processes.create(1, words="admin")
    events: list[object] = []
    for own in range(COUNT):
        processes.access(own).on_end(lambda user_id, own=own: events.append((own, user_id)))  # type: ignore[misc]
    logins = [processes.access(own).vouched("bob") for own in range(COUNT)]
    assert all(processes.access(own).permits(logins[own], Action.FETCH) for own in range(COUNT))
    processes.result(1, lambda users, done: users.grant(bob, None, done=done))
    assert all(processes.access(own).is_current(logins[own]) for own in range(COUNT))
    assert not any(processes.access(own).permits(logins[own], Action.FETCH) for own in range(COUNT))
    processes.run()
    events.clear()

    def done(_: object) -> None:
        assert not any(processes.access(own).is_current(logins[own]) for own in range(COUNT))
        events.append("done")

    processes.routed[1].users.delete_user(bob, done=done)
    processes.run()
    assert {(0, bob.id), (2, bob.id)} < set(events)
    assert events.index((1, bob.id)) > events.index("done")


def test_two_processes_change_one_user_at_the_same_time(processes: Processes) -> None:
    processes.create(0)
    results: list[Any] = []
    for own in range(COUNT):
        users = processes.routed[own].users
        bob = processes.access(own).user("bob")
        users.create_token(bob, f"t{own}", None, by=None, done=results.append)
        bob = processes.access(own).user("bob")
        users.grant(bob, parse_grants([("consume", "produce", "group")[own]]), done=results.append)
    processes.run()
    assert len(results) == 6
    found = [processes.access(own).user("bob") for own in range(COUNT)]
    assert sorted(token.name for token in found[0].tokens) == ["t0", "t1", "t2"], "no change is lost"
    assert found == found[:1] * 3
    made: list[Any] = []
    for own in range(COUNT):
        processes.routed[own].users.create_user("carol", "x", None, done=made.append)
    processes.until(lambda: len(made) == 3)
    assert [type(result) for result in made if isinstance(result, BrokerError)] == [Conflict] * 2
    assert len({processes.access(own).user("carol").id for own in range(COUNT)}) == 1


def test_a_token_ends_with_a_change_of_the_password_over_another_process(processes: Processes) -> None:
    bob = processes.create(0)
    tokens: list[Any] = []
    token = processes.routed[1].users.create_token(bob, "t", None, by=None, done=tokens.append)
    changed = processes.start(2, lambda users, done: users.change_password(bob, "secret", "second", done=done))
    processes.until(lambda: bool(changed) and bool(tokens))
    for own in range(COUNT):
        with pytest.raises(Denied):
            token_login(processes, own, token)


def test_a_process_without_the_first_one_serves_with_the_last_users(processes: Processes) -> None:
    processes.access(0).configure([ALICE])
    processes.run()
    bob, carol = processes.create(1), processes.create(1, "carol")
    processes.lose(0)
    processes.run()
    alice = processes.access(1).vouched("alice")
    assert processes.access(1).permits(alice, Action.FETCH)
    refused = processes.start(1, lambda users, done: users.delete_user(bob, by=alice, done=done))
    processes.run(RETRY_S)
    assert isinstance(refused[0], Unavailable)
    processes.access(0).delete_user(carol)
    processes.run(RETRY_S)
    assert processes.access(1).find_user("carol") == carol
    processes.lost.clear()
    processes.run(RETRY_S)
    processes.run(RETRY_S)
    assert processes.stored(1) == processes.stored(0)
    assert processes.access(1).find_user("carol") is None
    assert processes.result(2, lambda users, done: users.delete_user(bob, by=alice, done=done)) == bob


def test_a_process_knows_the_users_of_its_last_start(processes: Processes) -> None:
    processes.access(0).configure([ALICE])
    bob = processes.create(2)
    processes.lose(0)
    log: Any = processes.shards.brokers[1]._log
    again = Broker.over(
        lambda replay: log.reopen(replay, synced_only=False),
        settings=BrokerSettings(),
        loop=processes.shards.loop,
        clock=processes.shards.loop.clock,
    )
    assert not again.access.is_open
    assert again.access.find_user("bob") == bob
    processes.shards.brokers[1] = again
    processes.routed[1] = RoutedBroker(again, Seen(processes, 1))
    processes.run()
    assert processes.routed[1].values.are_stored
    assert not processes.routed[1].values.are_known
    processes.access(0).delete_user(bob)
    processes.lost.clear()
    processes.run(RETRY_S)
    assert processes.routed[1].values.are_known
    assert again.access.find_user("bob") is None, "it was deleted in the meantime"


def test_a_process_with_a_users_file_is_closed_until_it_knows_the_users() -> None:
    shards = MemoryShards(lambda broker: RouterFactory(broker, KEY), 2, own=1)
    access = shards.brokers[1].access
    access.require_login()
    assert not access.is_open
    assert not Values(shards.brokers[1], is_first=False).are_stored
    shards.brokers[0].access.configure([ALICE])
    RoutedBroker(shards.brokers[1], shards)
    for _ in range(20):
        shards.loop.run_due()
    assert access.permits(access.vouched("alice"), Action.CLUSTER_ALTER)
    shards.brokers[0].access.configure([ConfiguredUser("bob", HASH, EVERYTHING)])
    shards.loop.run_due()
    assert not access.is_open
    assert access.find_user("alice") is None


def test_a_process_that_does_not_respond_delays_a_change_shortly(processes: Processes) -> None:
    bob = processes.create(0)
    processes.links[2, 0].pause()
    changed = processes.start(1, lambda users, done: users.delete_user(bob, done=done))
    processes.run(APPLIED_S / 2)
    assert processes.access(1).find_user("bob") is None
    assert processes.access(2).find_user("bob") == bob
    assert changed == []
    processes.run(APPLIED_S)
    assert changed == [bob]
    again = processes.start(1, lambda users, done: users.set_verifiers("bob", {Mechanism.SHA_256: None}, done=done))
    processes.run()
    assert isinstance(again[0], Missing), "an error waits for no process"
    made = processes.start(1, lambda users, done: users.create_user("carol", "x", None, done=done))
    processes.until(lambda: processes.access(1).find_user("carol") is not None)
    processes.links[2, 0].break_off()
    processes.run()
    assert len(made) == 1, "a process that has ended is not waited for"


def test_many_changes_in_a_row_wait_each_for_its_own(processes: Processes) -> None:
    bob = processes.create(0)
    processes.links[2, 0].pause()
    first = processes.start(0, lambda users, done: users.grant(bob, parse_grants(["consume"]), done=done))
    processes.run()
    second = processes.start(0, lambda users, done: users.grant(bob, EVERYTHING, done=done))
    processes.run()
    assert (first, second) == ([], [])
    processes.links[2, 0].resume()
    processes.run()
    assert (len(first), len(second)) == (1, 1)


def test_names_can_be_swapped(processes: Processes) -> None:
    bob, carol = processes.create(0), processes.create(0, "carol")
    access = processes.access(0)
    access.update_user(bob, name="x")
    access.update_user(carol, name="bob")
    access.update_user(access.user(bob.id), name="carol")
    processes.run()
    for own in range(COUNT):
        assert processes.access(own).user("bob").id == carol.id
        assert processes.access(own).user("carol").id == bob.id
        assert [user.name for user in processes.access(own).users()] == ["iggy", "carol", "bob"]


def test_unknown_names_have_the_same_salt_in_all_processes(processes: Processes) -> None:
    salts = {processes.access(own).verifier("unknown", Mechanism.SHA_256).salt for own in range(COUNT)}
    assert len(salts) == 1


def test_invalid_calls_do_not_reach_the_first_process(processes: Processes) -> None:
    with pytest.raises(Invalid):
        processes.routed[1].users.create_user("\ud800", "x", None, done=print)
