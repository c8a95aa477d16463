"""Quotas of users and client ids: token buckets, precedence, and the text of settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.broker import client_quotas
from polywire.broker.client_quotas import (
    BURST_S,
    DEFAULT,
    Bucket,
    ClientQuotas,
    Entity,
    Quota,
    parse_quotas,
    parse_rate,
)
from polywire.errors import Invalid
from polywire.testing.loop import SimulatedClock

AMOUNTS = st.floats(0, 1e7)
RATES = st.floats(1, 1e6)


@given(rate=RATES, steps=st.lists(st.tuples(AMOUNTS, st.floats(0, 100)), max_size=30))
def test_a_client_that_pays_its_debts_never_exceeds_rate_and_burst(
    rate: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now, total = Bucket(rate, 0.0), 0.0, 0.0
    for amount, pause in steps:
        assert bucket.wait(now, amount) == bucket.wait(now, amount), "looking changes nothing"
        expected = bucket.wait(now, amount)
        wait = bucket.take(amount, now)
        assert wait == pytest.approx(expected)
        total += amount
        now += wait + pause
        assert total <= (rate * (now + BURST_S)) * 1.000001
    assert bucket.charged == pytest.approx(total)


@given(rate=RATES, amounts=st.lists(AMOUNTS, min_size=1, max_size=30))
def test_a_client_that_always_sends_gets_its_rate(rate: float, amounts: list[float]) -> None:
    bucket, now = Bucket(rate, 0.0), 0.0
    for amount in amounts:
        now += bucket.take(amount, now)
    assert now == pytest.approx(max(sum(amounts) / rate - BURST_S, 0.0), rel=1e-6, abs=1e-6)


@given(rate=RATES, later=RATES, amount=AMOUNTS)
def test_a_debt_is_paid_at_the_new_rate(rate: float, later: float, amount: float) -> None:
    bucket = Bucket(rate, 0.0)
    debt = bucket.take(amount, 0.0) * rate
    bucket.change(later, 0.0)
    assert bucket.wait(0.0) == pytest.approx(debt / later, rel=1e-6, abs=1e-6)
    assert bucket.wait(0.0, later * BURST_S) <= (debt / later + BURST_S) * 1.000001


def test_time_that_goes_backwards_changes_nothing() -> None:
    bucket = Bucket(10, 5.0)
    bucket.take(10, 5.0)
    assert bucket.wait(1.0) == 0
    assert bucket.take(10, 1.0) == 1.0


ORDER: list[tuple[Entity, float]] = [
    (("alice", "etl"), 1.0),
    (("alice", DEFAULT), 2.0),
    (("alice", None), 3.0),
    ((DEFAULT, "etl"), 4.0),
    ((DEFAULT, DEFAULT), 5.0),
    ((DEFAULT, None), 6.0),
    ((None, "etl"), 7.0),
    ((None, DEFAULT), 8.0),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_most_specific_quota_applies_as_in_kafka(first: int) -> None:
    quotas = ClientQuotas(tuple(Quota(*entity, produce=rate) for entity, rate in ORDER[first:]))
    assert quotas._limit("produce", "alice", "etl") == ORDER[first]
    assert quotas._limit("fetch", "alice", "etl")[1] is None


def test_each_limit_has_its_own_most_specific_quota() -> None:
    quotas = ClientQuotas((Quota("alice", None, produce=5.0), Quota(DEFAULT, None, produce=1.0, fetch=2.0)))
    assert quotas._limit("produce", "alice", None)[1] == 5.0
    assert quotas._limit("fetch", "alice", None)[1] == 2.0
    assert quotas._limit("produce", "bob", None)[1] == 1.0
    assert quotas._limit("produce", None, None)[1] == 1.0, "clients without a login have the default quota"


def test_there_is_no_meter_without_a_quota() -> None:
    quotas = ClientQuotas()
    assert quotas.meter("alice", "etl", "10.0.0.1", 0) is None
    quotas.put(("bob", None), Quota("bob", None, produce=5.0))
    assert quotas.meter("alice", "etl", "10.0.0.1", 0) is None
    assert quotas.meter("bob", "etl", "10.0.0.1", 0) is not None


def test_connections_of_a_user_share_a_bucket_and_other_users_do_not() -> None:
    clock = SimulatedClock()
    quotas = ClientQuotas((Quota(DEFAULT, None, produce=10_000.0),), clock)
    first, second = (quotas.meter("alice", None, host, 0) for host in ("10.0.0.1", "10.0.0.2"))
    other, nameless = quotas.meter("bob", None, "10.0.0.1", 0), quotas.meter(None, None, "10.0.0.1", 0)
    assert first is not None
    assert second is not None
    assert other is not None
    assert nameless is not None
    first.received(20_000)
    assert first.delay() == pytest.approx(1.0)
    second.received(20_000)
    assert second.delay() == pytest.approx(3.0)
    for meter in (other, nameless):
        meter.received(10_000)
        assert meter.delay() == 0
    clock.advance(3.0)
    assert second.delay() == pytest.approx(0.0, abs=1e-6)


def test_a_connection_with_little_traffic_is_not_delayed_by_the_debt_of_others() -> None:
    clock = SimulatedClock()
    quotas = ClientQuotas((Quota("alice", None, fetch=100_000.0, requests=1.0),), clock)
    reader, member = (quotas.meter("alice", None, "10.0.0.1", 0) for _ in range(2))
    assert reader is not None
    assert member is not None
    reader.sent(1_000_000)
    member.sent(50)
    assert reader.delay() == pytest.approx(9.0)
    assert member.delay() == 0
    member.sent(5_000)
    assert member.delay() > 9.0
    member.executed(3)
    assert member.delay_ms(10) >= 9_000


def test_a_response_is_reported_with_the_delay_that_it_causes() -> None:
    quotas = ClientQuotas((Quota("alice", None, fetch=1_000.0),), SimulatedClock())
    meter = quotas.meter("alice", None, "10.0.0.1", 0)
    assert meter is not None
    assert meter.delay_ms(3_000) == 2_000
    assert meter.delay() == 0, "the response is not charged before it is sent"
    meter.sent(3_000)
    assert meter.delay() == pytest.approx(2.0)
    assert meter.delay_ms(0) == 2_000


def test_a_client_cannot_avoid_a_delay_by_changing_its_client_id() -> None:
    quotas = ClientQuotas((Quota("alice", None, produce=1_000.0),), SimulatedClock())
    before, after = (quotas.meter("alice", name, "10.0.0.1", 0) for name in ("one", "two"))
    assert before is not None
    assert after is not None
    before.received(3_000)
    after.succeed(before)
    assert after.delay() == pytest.approx(2.0)


def test_clients_that_choose_many_ids_need_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_quotas, "BUCKETS_MAX", 10)
    clock = SimulatedClock()
    quotas = ClientQuotas((Quota(None, DEFAULT, produce=1_000.0),), clock)
    debtor = quotas.meter(None, "debtor", "10.0.0.1", 0)
    assert debtor is not None
    debtor.received(5_000)
    for number in range(1_000):
        assert quotas.meter(None, f"id-{number}", "10.0.0.1", 0) is not None
    assert len(quotas._buckets) <= 10
    again = quotas.meter(None, "debtor", "10.0.0.1", 0)
    assert again is not None
    again.received(1_000)
    assert again.delay() == pytest.approx(5.0), (
        "the bucket of a client in debt is not dropped for those of idle clients"
    )
    for number in range(50):
        meter = quotas.meter(None, f"busy-{number}", "10.0.0.1", 0)
        assert meter is not None
        meter.received(5_000)
    assert len(quotas._buckets) <= 10
    assert quotas.totals()[(None, DEFAULT), "produce"][0] == 256_000, "dropped buckets remain in the totals"


def test_a_stored_quota_takes_precedence_over_a_configured_one() -> None:
    quotas = ClientQuotas((Quota("alice", None, produce=5.0),))
    quotas.put(("alice", None), Quota("alice", None))
    assert quotas.meter("alice", None, "10.0.0.1", 0) is None
    quotas.put(("alice", None), None)
    assert quotas._limit("produce", "alice", None)[1] == 5.0


def test_quotas_are_parsed_from_text() -> None:
    assert parse_quotas(
        " user=alice produce=1MB fetch=2.5MiB; client-id=* requests=100; user=* client-id=etl fetch=1k;"
    ) == (
        Quota("alice", None, produce=1e6, fetch=2.5 * 1024 * 1024),
        Quota(None, DEFAULT, requests=100.0),
        Quota(DEFAULT, "etl", fetch=1000.0),
    )
    assert parse_quotas("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("produce=5", "needs a user or a client id"),
        ("user=alice", "needs a limit"),
        ("user=alice produce=5; user=alice fetch=5", "user=alice has two entries"),
        ("user=alice produce=5 produce=6", "got='produce=6'"),
        ("user=alice speed=5", "got='speed=5'"),
        ("user= produce=5", "got='user='"),
        ("user=alice produce=fast", "got='fast'"),
        ("user=alice produce=5XB", "got='5XB'"),
        ("user=alice produce=0", "must be a number from 1"),
        ("user=alice produce=nan", "got=nan"),
        ("user=alice produce=1e99", "must be a number from 1"),
        (f"client-id={'x' * 256} produce=5", "client id is too long"),
    ],
)
def test_invalid_text_is_rejected(text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        parse_quotas(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("5", 5), ("5B", 5), ("1kB", 1000), ("1KiB", 1024), ("1.5M", 1.5e6), ("2GiB", 2 * 1024**3)]
)
def test_units(text: str, rate: float) -> None:
    assert parse_rate(text) == rate
