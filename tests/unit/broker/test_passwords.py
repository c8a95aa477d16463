"""The order of queued logins: fair by address, and delays after wrong passwords."""

from __future__ import annotations

from polywire.broker.passwords import (
    ADDRESS_DELAY_MAX_S,
    ADDRESS_FREE,
    FAILURES_FORGOTTEN_S,
    FAILURES_KEPT_MAX,
    NAME_DELAY_MAX_S,
    NAME_FREE,
    Attempt,
    Backoff,
    Failures,
    LoginQueue,
    Origin,
    origin_of,
)


def nothing() -> None:
    pass


def attempt(address: str, name: str = "", *, strikes: int = 0, ready_at: float = 0.0) -> Attempt:
    return Attempt(Origin(f"{address}:{name}", address, name), ready_at, strikes, nothing, nothing)


def order(queue: LoginQueue, now: float = 0.0) -> list[str]:
    taken = []
    while (found := queue.take(now)) is not None:
        taken.append(found.origin.address + found.origin.name)
    return taken


def test_addresses_take_turns() -> None:
    queue = LoginQueue(64)
    for name in "123":
        assert queue.add(attempt("a", name)) is None
    queue.add(attempt("b", "1"))
    queue.add(attempt("b", "2"))
    assert order(queue) == ["a1", "b1", "a2", "b2", "a3"]


def test_a_returning_address_waits_its_turn() -> None:
    queue = LoginQueue(64)
    for name in "12":
        queue.add(attempt("a", name))
    taken = []
    for _ in range(4):
        queue.add(attempt("b"))
        found = queue.take(0.0)
        assert found is not None
        taken.append(found.origin.address)
    assert taken.count("a") == 2, "an address that keeps returning must not starve others"


def test_clients_without_failures_go_first_within_an_address() -> None:
    queue = LoginQueue(64)
    for name in "12":
        queue.add(attempt("a", name, strikes=3))
    queue.add(attempt("a", "3"))
    assert order(queue) == ["a3", "a1", "a2"]


def test_names_take_turns_within_an_address() -> None:
    queue = LoginQueue(64)
    for _ in range(3):
        queue.add(attempt("a", "alice"))
    queue.add(attempt("a", "bob"))
    assert order(queue) == ["aalice", "abob", "aalice", "aalice"]
    queue.add(attempt("a", "alice"))
    queue.add(attempt("a", "alice"))
    taken = []
    for number in range(6):
        queue.add(attempt("a", f"guess{number}"))
        found = queue.take(0.0)
        assert found is not None
        taken.append(found.origin.name)
    assert taken.count("alice") == 2, "new names must not starve earlier ones"


def test_a_full_queue_drops_from_the_address_with_the_most_logins() -> None:
    queue = LoginQueue(3)
    first, worse, third = attempt("a", "1", strikes=1), attempt("a", "2", strikes=2), attempt("a", "3", strikes=1)
    for each in (first, worse, third):
        assert queue.add(each) is None
    assert queue.add(attempt("b")) is worse
    assert queue.add(attempt("c")) is third, "among equals the latest attempt is dropped"
    late = attempt("c", "2")
    assert queue.add(late) is late
    assert len(queue) == 3


def test_a_delayed_login_does_not_delay_others() -> None:
    queue = LoginQueue(64)
    queue.add(attempt("a", ready_at=5.0))
    queue.add(attempt("b", ready_at=1.0))
    assert queue.take(0.0) is None
    assert queue.next_at() == 1.0
    assert order(queue, 4.0) == ["b"]
    assert order(queue, 5.0) == ["a"]
    assert queue.next_at() is None


def test_wrong_logins_delay_an_address_and_a_name() -> None:
    backoff = Backoff()
    for number in range(ADDRESS_FREE):
        backoff.wrong(Origin(f"p{number}", "a", f"n{number}"), 0.0)
    assert backoff.delay_s(Origin("p", "a", "other"), 0.0) > 0
    assert backoff.delay_s(Origin("p", "b", "n1"), 0.0) == 0
    assert backoff.strikes(Origin("p1", "a", "x"), 0.0) == 1
    for number in range(100):
        backoff.wrong(Origin("p", f"a{number}", "root"), 0.0)
        backoff.wrong(Origin("p", "a", f"n{number}"), 0.0)
    assert backoff.delay_s(Origin("q", "c", "root"), 0.0) == NAME_DELAY_MAX_S
    assert backoff.delay_s(Origin("q", "a", "x"), 0.0) == ADDRESS_DELAY_MAX_S
    assert backoff.delay_s(Origin("q", "a", "root"), FAILURES_FORGOTTEN_S) == 0
    assert NAME_FREE < 100


def test_an_earlier_success_from_an_address_avoids_delays_caused_by_others() -> None:
    backoff = Backoff()
    home = Origin("p", "a", "alice")
    backoff.right(home)
    for number in range(50):
        backoff.wrong(Origin(f"g{number}", "b", "alice"), 0.0)
        backoff.wrong(Origin(f"h{number}", "a", "bob"), 0.0)
    assert backoff.delay_s(home, 0.0) == 0
    assert backoff.delay_s(Origin("p", "c", "alice"), 0.0) > 0
    backoff.wrong(Origin("q", "a", "alice"), 0.0)
    backoff.wrong(Origin("q", "a", "alice"), 0.0)
    assert backoff.delay_s(home, 0.0) > 0, "wrong passwords of its own do delay it"


def test_remembered_failures_are_bounded() -> None:
    failures = Failures()
    for number in range(FAILURES_KEPT_MAX + 1):
        failures.add(str(number), 0.0)
    assert failures.count("0", 0.0) == 0
    assert failures.count("1", 0.0) == 1
    failures.forget("1")
    assert failures.count("1", 0.0) == 0


def test_an_ipv6_address_counts_by_its_64_bit_network() -> None:
    assert origin_of("10.0.0.1:5", "n") == Origin("10.0.0.1:5", "10.0.0.1", "n")
    site = origin_of("2001:db8::1:5", "n").address
    assert site == origin_of("2001:db8::ffff:6", "n").address
    assert site != origin_of("2001:db8:0:1::1:5", "n").address
    assert origin_of("fe80::1%eth0:5", "n").address
    assert origin_of("", "n").address == ""
