"""Request latencies: from receipt to response, without requests that have none, and sampled."""

from __future__ import annotations

from polywire.server.hub import SAMPLES_PER_S, RequestTimes
from tests.unit.server.peers import Place, Wire, send

WIRE = "frames"


def counted(place: Place) -> dict[str, tuple[float, float]]:
    """Return how many requests of each kind were answered, and their total time."""
    found = place.hub.request_times.by_kind.items()
    return {kind: (times.cumulative()[-1][1], round(times.sum_s, 6)) for (wire, kind), times in found if wire == WIRE}


def connected() -> tuple[Place, Wire]:
    place = Place()
    place.clock.advance(1.0)  # no real clock returns 0
    transport = place.connect()
    place.session.owing = True
    send(transport, b"F")  # recognized
    place.session.owing = False
    return place, transport


def ask(place: Place, transport: Wire, *, owing: bool = True) -> None:
    """Deliver a request; its response is pending from then on."""
    place.session.on_receive = lambda: setattr(place.session, "owing", owing)
    send(transport, b"x")
    place.session.on_receive = None


def answer(place: Place, transport: Wire) -> None:
    place.session.owing = False
    transport.connection.write(b"done")


def test_a_request_is_timed_until_its_response_is_written() -> None:
    place, transport = connected()
    ask(place, transport)
    place.clock.advance(0.25)
    assert counted(place) == {}
    answer(place, transport)
    transport.connection.write(b"what was not asked for")
    assert counted(place) == {"produce": (1, 0.25)}


def test_an_immediate_response_is_counted_by_kind() -> None:
    place, transport = connected()

    def answered() -> None:
        place.clock.advance(0.001)
        transport.connection.write_many([b"a", b"b"])

    place.session.size = 5
    place.session.on_receive = answered
    send(transport, b"y")  # not a frame: nothing was produced
    assert counted(place) == {"other": (1, 0.001)}


def test_a_request_without_a_response_is_not_counted() -> None:
    place, transport = connected()
    ask(place, transport, owing=False)
    place.clock.advance(5)
    ask(place, transport)
    place.clock.advance(0.5)
    answer(place, transport)
    assert counted(place) == {"produce": (1, 0.5)}


def test_later_bytes_do_not_end_the_timing_of_a_request() -> None:
    place, transport = connected()
    ask(place, transport)
    place.clock.advance(0.5)
    ask(place, transport)
    place.clock.advance(0.5)
    answer(place, transport)
    assert counted(place) == {"produce": (1, 1.0)}


def test_a_queued_request_is_not_timed_as_the_first() -> None:
    place, transport = connected()
    place.session.owing = True
    send(transport, b"x")
    place.clock.advance(0.5)
    answer(place, transport)
    assert counted(place) == {}


def test_many_requests_are_sampled_with_weights() -> None:
    place, transport = connected()
    place.session.on_receive = lambda: transport.connection.write(b"done")
    seconds, per_second = 20, 5_000
    begun = 0.0
    for second in range(seconds):
        for _ in range(per_second):
            send(transport, b"x")
        place.hub.request_times.sweep()
        if second == seconds // 2 - 1:
            begun = counted(place)["other"][0]
    times = place.hub.request_times
    assert times.weight > per_second // SAMPLES_PER_S // 4
    stands_for = (counted(place)["other"][0] - begun) / (seconds / 2 * per_second)
    assert 0.9 < stands_for < 1.1


def test_an_idle_server_times_all_requests_again() -> None:
    times = RequestTimes()
    for _ in range(8 * SAMPLES_PER_S):
        times.begin()
    assert times.weight == 256
    for _ in range(9):
        times.sweep()
    assert (times.weight, times.skip) == (1, 0)
