"""Delays of connections that exceed a quota."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polywire.broker.client_quotas import DEFAULT, ClientQuotas, Quota
from polywire.broker.users import LINKS, Principal
from polywire.server.hub import Hub
from tests.unit.server.peers import Place, Wire, send


class Timers:
    """Calls functions when the place's clock is advanced."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.pending: list[tuple[float, Callable[[], None], Timers.Handle]] = []

    class Handle:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    def later(self, seconds: float, callback: Callable[[], None]) -> Handle:
        handle = Timers.Handle()
        self.pending.append((self._place.clock.monotonic() + seconds, callback, handle))
        return handle

    def advance(self, seconds: float) -> None:
        self._place.clock.advance(seconds)
        now = self._place.clock.monotonic() + 1e-9
        due, self.pending = [t for t in self.pending if t[0] <= now], [t for t in self.pending if t[0] > now]
        for _, callback, handle in due:
            if not handle.cancelled:
                callback()


class MeteredPlace(Place):
    def __init__(self, *quotas: Quota) -> None:
        super().__init__()
        self.timers = Timers(self)
        self.quotas = ClientQuotas(quotas, self.clock)
        self.hub = Hub(self, soon=self.soon.append, later=self.timers.later, clock=self.clock, quotas=self.quotas)

    def login(self, transport: Wire, name: str, user_id: int = 1) -> None:
        transport.connection.identified(Principal(user_id, name))


def test_a_connection_without_a_quota_has_no_meter() -> None:
    place = MeteredPlace()
    transport = place.connect()
    send(transport, b"x" * 1_000_000)
    assert transport.connection.meter is None
    assert transport.reading


def test_a_client_that_sends_too_much_is_not_read_until_its_debt_is_paid() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, produce=10_000.0))
    transport = place.connect()
    send(transport, b"x" * 10_000)
    assert transport.reading
    send(transport, b"x" * 10_000)
    assert not transport.reading
    assert len(place.session.frames) == 20_000, "the request itself is executed"
    place.timers.advance(0.9)
    assert not transport.reading
    place.timers.advance(0.2)
    assert transport.reading
    assert place.session.drained_count


def test_a_request_that_is_arriving_is_read_completely() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, produce=10_000.0))
    transport = place.connect()
    place.session.size = place.session.need = 100_000
    send(transport, b"x" * 99_000)
    assert transport.reading, "a client cannot finish a request that is not read"
    send(transport, b"x" * 1_000)
    assert not transport.reading
    place.timers.advance(9.1)
    assert transport.reading


def test_other_users_are_not_delayed() -> None:
    place = MeteredPlace(Quota("alice", None, produce=10_000.0))
    alice, bob = place.connect(), place.connect()
    place.login(alice, "alice")
    place.login(bob, "bob", 2)
    send(alice, b"x" * 15_000)
    send(bob, b"x" * 100_000)
    assert (alice.reading, bob.reading) == (False, True)


def test_a_client_that_receives_too_much_gets_nothing_more_until_its_debt_is_paid() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, fetch=10_000.0))
    transport = place.connect()
    send(transport, b"a")
    connection = transport.connection
    assert connection.backlog <= connection.backlog_max
    connection.write_many([b"x" * 15_000, b"y" * 5_000])
    assert connection.backlog > connection.backlog_max, "sessions stop sending"
    assert not transport.reading
    place.timers.advance(1.1)
    assert connection.backlog <= connection.backlog_max
    assert transport.reading


def test_a_client_with_too_many_requests_is_delayed() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, requests=10.0))
    transport = place.connect()
    send(transport, b"x" * 20)
    assert not transport.reading
    place.timers.advance(1.1)
    assert transport.reading


def test_a_delay_is_longer_if_others_have_used_the_quota_meanwhile() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, produce=10_000.0))
    first, second = place.connect(), place.connect()
    send(first, b"x" * 15_000)
    send(second, b"x" * 10_000)
    place.timers.advance(0.6)
    assert (first.reading, second.reading) == (False, False)
    place.timers.advance(1.0)
    assert first.reading


@pytest.mark.parametrize("rate", [None, 1e9])
def test_a_change_of_the_quota_ends_a_delay(rate: float | None) -> None:
    place = MeteredPlace()
    transport = place.connect()
    send(transport, b"x" * 100_000)
    place.quotas.put((DEFAULT, None), Quota(DEFAULT, None, produce=1.0))
    send(transport, b"x" * 100_000)
    assert not transport.reading
    place.quotas.put((DEFAULT, None), Quota(DEFAULT, None, produce=rate))
    place.run_pass()
    assert transport.reading
    assert (transport.connection.meter is None) is (rate is None)


def test_a_login_and_a_client_id_choose_the_quota() -> None:
    place = MeteredPlace(Quota("alice", None, produce=10_000.0), Quota(None, "etl", produce=20_000.0))
    transport = place.connect()
    connection = transport.connection
    assert connection.meter is None
    connection.set_client_id("etl")
    assert connection.meter is not None
    place.login(transport, "alice")
    send(transport, b"x" * 15_000)
    assert not transport.reading
    connection.set_client_id("other")
    assert connection.meter is not None


def test_processes_of_the_broker_are_not_delayed() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, produce=10.0))
    transport = place.connect()
    transport.connection.identified(LINKS)
    send(transport, b"x" * 10_000)
    assert transport.connection.meter is None
    assert transport.reading


def test_a_delayed_connection_is_closed_by_no_timeout_and_at_once_when_the_broker_stops() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, produce=10.0))
    transport = place.connect()
    send(transport, b"x" * 10_000)
    for _ in range(100):
        place.hub.sweep()
    assert not transport.aborted
    place.hub.draining = True
    transport.connection.stop_reading()
    assert not transport.connection.is_waiting
    assert transport.connection.backlog_max > 0


def test_closing_a_delayed_connection_cancels_its_timer() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, produce=10.0))
    transport = place.connect()
    send(transport, b"x" * 10_000)
    transport.connection.abort()
    assert all(handle.cancelled for _, _, handle in place.timers.pending)


def test_metrics_count_charges_and_delays() -> None:
    place = MeteredPlace(Quota(DEFAULT, None, produce=10_000.0))
    transport = place.connect()
    send(transport, b"x" * 15_000)
    charged, delayed = place.quotas.totals()[(DEFAULT, None), "produce"]
    assert charged == 15_000
    assert delayed == pytest.approx(0.5, abs=0.01)
