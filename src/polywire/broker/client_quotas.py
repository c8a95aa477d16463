"""Quotas of users and client ids: bytes produced, bytes fetched and requests per second (decision 0139).

* A quota applies to a user, a client id, or both. ``DEFAULT`` stands for all users, or all client ids, without a quota
  of their own. The most specific quota applies, in the order of Apache Kafka.
* Quotas are enforced with token buckets. The broker does not read from a connection that exceeds its quota until the
  debt is paid. Requests are never rejected.
* Every process of a broker enforces quotas for its own connections, as every broker of a Kafka cluster does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil, isfinite
from typing import Final, TypeAlias

import msgspec

from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.errors import Corrupt, ErrorCode, Invalid

STORED_AS: Final = "quotas"  # quotas are stored like the state of a protocol of this name, one value per entity
DEFAULT: Final = ""
"""Stands for every user, or every client id, that has no quota of its own. Each of them has its own bucket."""
KINDS: Final = ("produce", "fetch", "requests")
RATE_MAX: Final = 1e15
CLIENT_ID_BYTES_MAX: Final = 255
QUOTAS_MAX: Final = 10_000
BURST_S: Final = 1.0  # seconds of the rate that an idle client may use at once
# A connection that moves at most this many bytes per second is not delayed. Otherwise a group member's heartbeats would
# wait for records that the same user fetches over other connections.
SMALL_BYTES: Final = 4096
SMALL_SHARE: Final = 8  # with a low quota, this fraction of the quota is the limit instead: 1/8
# Clients choose their ids, and could create any number of buckets. Above this number, buckets of idle clients are
# dropped.
BUCKETS_MAX: Final = 10_000

Entity: TypeAlias = tuple[str | None, str | None]
"""User and client id of a quota. None means that the quota does not depend on the user, or on the client id."""


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """The limits of one entity.

    Attributes:
        user, client_id: the entity; a name, ``DEFAULT``, or None.
        produce, fetch: bytes per second; None for no limit.
        requests: requests per second; None for no limit.
    """

    user: str | None
    client_id: str | None
    produce: float | None = None
    fetch: float | None = None
    requests: float | None = None

    @property
    def entity(self) -> Entity:
        return self.user, self.client_id

    @property
    def limits(self) -> Mapping[str, float]:
        found = {kind: getattr(self, kind) for kind in KINDS}
        return {kind: rate for kind, rate in found.items() if rate is not None}

    def altered(self, limits: Mapping[str, float | None]) -> Quota:
        """Return the quota with some limits replaced. Raises Invalid(INVALID_REQUEST)."""
        for kind, rate in limits.items():
            check_limit(kind, rate)
        found = {kind: None if rate is None else float(rate) for kind, rate in limits.items()}
        return msgspec.structs.replace(self, **found)


_ENCODER: Final = msgspec.msgpack.Encoder()
_QUOTAS: Final = msgspec.msgpack.Decoder(Quota)
_KEYS: Final = msgspec.json.Encoder()


def key_of(entity: Entity) -> str:
    """Return the key under which a quota is stored."""
    return _KEYS.encode(entity).decode()


def encode_quota(quota: Quota) -> bytes:
    return _ENCODER.encode(quota)


def decode_quota(value: bytes) -> Quota:
    """Decode a stored quota. Raises Corrupt(CORRUPT)."""
    try:
        return _QUOTAS.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(ErrorCode.CORRUPT, f"stored quota is unreadable reason={error}") from error


def check_limit(kind: str, rate: float | None) -> None:
    if kind not in KINDS:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown limit of a quota (use {', '.join(KINDS)}) got={kind!r:.40}")
    if rate is not None and not (isfinite(rate) and 1 <= rate <= RATE_MAX):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"limit of a quota must be a number from 1 to {RATE_MAX:g} per second limit={kind} got={rate!r:.40}",
        )


def check_entity(entity: Entity) -> None:
    """Raise Invalid(INVALID_REQUEST) for an entity without a user and a client id, or with a client id that is too long."""
    user, client_id = entity
    if user is None and client_id is None:
        raise Invalid(ErrorCode.INVALID_REQUEST, "a quota needs a user or a client id")
    if client_id is not None and len(client_id.encode("utf-8", "replace")) > CLIENT_ID_BYTES_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"client id is too long limit={CLIENT_ID_BYTES_MAX}")


def entity_text(entity: Entity) -> str:
    """Return an entity as it is written in settings and messages."""
    names = zip(("user", "client-id"), entity, strict=True)
    return " ".join(f"{kind}={name or '*'}" for kind, name in names if name is not None)


def parse_quotas(text: str) -> tuple[Quota, ...]:
    """Parse ``user=alice produce=1000000; client-id=* requests=50``.

    Raises Invalid(INVALID_REQUEST) for another text.
    """
    found: dict[Entity, Quota] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        quota = _parse_quota(part)
        if quota.entity in found:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"quotas are invalid: {entity_text(quota.entity)} has two entries")
        found[quota.entity] = quota
    return tuple(found.values())


def _parse_quota(part: str) -> Quota:
    words = dict.fromkeys(("user", "client-id", *KINDS), "")
    for word in part.split():
        name, _, value = word.partition("=")
        if name not in words or words[name] or not value:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"quotas are invalid (use user=NAME client-id=ID {' '.join(f'{kind}=RATE' for kind in KINDS)};"
                f" * stands for the default) got={word[:80]!r}",
            )
        words[name] = value
    user, client_id = (_name_or_default(words[name]) for name in ("user", "client-id"))
    check_entity((user, client_id))
    limits = {kind: parse_rate(words[kind]) for kind in KINDS if words[kind]}
    if not limits:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"a quota needs a limit: {', '.join(KINDS)} got={part[:80]!r}")
    return Quota(user, client_id).altered(limits)


def _name_or_default(word: str) -> str | None:
    return (DEFAULT if word == "*" else word) if word else None


_UNITS: Final = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


def parse_rate(text: str) -> float:
    """Parse a number with an optional unit, such as 500, 100kB or 1.5MiB. Raises Invalid(INVALID_REQUEST)."""
    digits = text.rstrip("kKmMgGiIbB")
    factor = _UNITS.get(text[len(digits) :].lower().removesuffix("b"))
    try:
        rate = float(digits) * factor if factor is not None else None
    except ValueError:
        rate = None
    if rate is None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"rate is invalid (use a number, optionally with kB, MB, KiB or MiB) got={text[:40]!r}",
        )
    return rate


class Bucket:
    """A token bucket that may go into debt.

    Attributes:
        throttled_s: total seconds for which the bucket has delayed connections.
        charged: total amount taken from the bucket.
    """

    __slots__ = ("_at", "_balance", "charged", "rate", "throttled_s")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._balance = rate * BURST_S
        self._at = now
        self.charged = 0.0
        self.throttled_s = 0.0

    def change(self, rate: float, now: float) -> None:
        """Change the rate. A debt remains, and is paid at the new rate."""
        self._refill(now)
        self.rate = rate
        self._balance = min(self._balance, rate * BURST_S)

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._balance = min(self._balance + (now - self._at) * self.rate, self.rate * BURST_S)
            self._at = now

    def take(self, count: float, now: float) -> float:
        """Charge ``count``. Return the seconds until the debt is paid, or 0 if there is none."""
        self._refill(now)
        self._balance -= count
        self.charged += count
        return max(-self._balance / self.rate, 0.0)

    def wait(self, now: float, more: float = 0.0) -> float:
        """Return what ``take(more)`` would return, without charging."""
        self._refill(now)
        return max((more - self._balance) / self.rate, 0.0)

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._balance >= self.rate * BURST_S


class Meter:
    """Charges one connection's traffic to the buckets that apply to it.

    Attributes:
        requests_before: number of the session's requests that are already charged.
    """

    __slots__ = ("_buckets", "_now", "_small", "_until", "requests_before")

    def __init__(self, buckets: Mapping[str, Bucket], now: Callable[[], float], requests_before: int) -> None:
        self._buckets: Final = buckets
        self._now: Final = now
        self._until: dict[str, float] = {}  # by kind, the time at which this connection's part of the debt is paid
        # bytes of this connection in a second, by kind, as (second, bytes)
        self._small: dict[str, tuple[int, int]] = {}
        self.requests_before = requests_before

    def succeed(self, before: Meter) -> None:
        """Copy the delays of the connection's previous meter, after the client has changed its user or client id.

        Otherwise a client could avoid delays by changing its client id with every request.
        """
        self._small = before._small
        self._until = {
            kind: until for kind, until in before._until.items() if self._buckets.get(kind) is before._buckets[kind]
        }

    def received(self, size: int) -> None:
        self._charge_bytes("produce", size)

    def sent(self, size: int) -> None:
        self._charge_bytes("fetch", size)

    def executed(self, requests: int) -> None:
        """Charge the requests that were executed since the last call. ``requests`` is the session's total."""
        count, self.requests_before = requests - self.requests_before, requests
        bucket = self._buckets.get("requests")
        if bucket is not None and count > 0:
            now = self._now()
            self._until["requests"] = now + bucket.take(count, now)

    def _charge_bytes(self, kind: str, size: int) -> None:
        bucket = self._buckets.get(kind)
        if bucket is None:
            return
        now = self._now()
        wait = bucket.take(size, now)
        if not self._is_small(kind, size, bucket.rate, now):
            self._until[kind] = now + wait

    def _is_small(self, kind: str, size: int, rate: float, now: float) -> bool:
        second, moved = self._small.get(kind, (0, 0))
        moved = moved + size if second == int(now) else size
        self._small[kind] = int(now), moved
        return moved <= min(SMALL_BYTES, rate / SMALL_SHARE)

    def delay(self) -> float:
        """Return the seconds for which the connection must not be read."""
        return max(max(self._until.values(), default=0.0) - self._now(), 0.0)

    def delay_ms(self, size: int) -> int:
        """Return the delay in milliseconds to report in a response of ``size`` bytes, which is not charged yet."""
        delay, bucket = self.delay(), self._buckets.get("fetch")
        if bucket is not None and size > min(SMALL_BYTES, bucket.rate / SMALL_SHARE):
            delay = max(delay, bucket.wait(self._now(), size))
        return min(ceil(delay * 1000), 2**31 - 1)

    def remaining(self) -> float:
        """Return the seconds that a delayed connection must still wait.

        It may have to wait longer than planned, because other connections use the same buckets.
        """
        now = self._now()
        waits = [self._buckets[kind].wait(now) for kind in self._until]
        delay = max(waits, default=0.0)
        if not delay:
            self._until.clear()
        return delay

    def delayed(self, seconds: float) -> None:
        """Count a delay of the connection, for metrics."""
        for kind, until in self._until.items():
            if until > self._now():
                self._buckets[kind].throttled_s += seconds


class ClientQuotas:
    """All quotas: those of the configuration, those changed at run time, and their buckets."""

    __slots__ = ("_buckets", "_changed", "_clock", "_configured", "_dropped", "_stored")

    def __init__(self, configured: tuple[Quota, ...] = (), clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock: Final = clock
        self._configured = {quota.entity: quota for quota in configured}
        self._stored: dict[Entity, Quota] = {}
        self._buckets: dict[tuple[Entity, Entity, str], Bucket] = {}
        self._dropped: dict[tuple[Entity, str], tuple[float, float]] = {}  # the totals of dropped buckets
        self._changed: Callable[[], None] = _nothing

    def __iter__(self) -> Iterator[Quota]:
        """Return the effective quotas in a fixed order.

        A quota without limits means that the configured limits were removed at run time.
        """
        return iter([quota for _, quota in sorted(self._effective().items(), key=_order)])

    def _effective(self) -> Mapping[Entity, Quota]:
        return {**self._configured, **self._stored}

    def is_configured(self, entity: Entity) -> bool:
        return entity in self._configured and entity not in self._stored

    @property
    def stored_count(self) -> int:
        return len(self._stored)

    def stored(self, user: str) -> list[Quota]:
        """Return the quotas of a user that were set at run time."""
        return [quota for quota in self._stored.values() if quota.user == user]

    def configured(self, entity: Entity) -> Quota:
        """Return the configured limits of an entity: a quota without limits if there are none."""
        return self._configured.get(entity) or Quota(*entity)

    def of(self, entity: Entity) -> Quota:
        """Return the limits of an entity: a quota without limits if there are none."""
        return self._stored.get(entity) or self.configured(entity)

    def is_as_configured(self, quota: Quota) -> bool:
        """Return whether a quota equals the configured one, so that it need not be stored."""
        return quota == self.configured(quota.entity)

    def watch(self, changed: Callable[[], None]) -> None:
        """Register a function that is called after every change of quotas."""
        self._changed = changed

    def configure(self, quotas: tuple[Quota, ...]) -> None:
        """Replace the quotas of the configuration."""
        self._configured = {quota.entity: quota for quota in quotas}
        self._changed()

    def put(self, entity: Entity, quota: Quota | None) -> None:
        """Apply a stored quota. None removes it, so that the configured one applies."""
        if quota is None:
            self._stored.pop(entity, None)
            for key in [key for key in self._dropped if key[0] == entity]:
                del self._dropped[key]
        else:
            self._stored[entity] = quota
        self._changed()

    def meter(self, user: str | None, client_id: str | None, host: str, requests: int) -> Meter | None:
        """Return a meter for a connection; None if no quota applies.

        Args:
            user: None for a client that is not logged in. Quotas for all users then apply to each ``host``.
            client_id: None if the client has not sent any.
            requests: the session's count of requests so far.
        """
        if not self._stored and not self._configured:
            return None
        buckets = {}
        for kind in KINDS:
            entity, rate = self._limit(kind, user, client_id)
            if rate is not None:
                buckets[kind] = self._bucket(entity, (user or host, client_id), kind, rate)
        return Meter(buckets, self._clock.monotonic, requests) if buckets else None

    def _limit(self, kind: str, user: str | None, client_id: str | None) -> tuple[Entity, float | None]:
        for entity in _candidates(user, client_id):
            rate = getattr(self.of(entity), kind)
            if rate is not None:
                return entity, rate
        return (None, None), None

    def _bucket(self, entity: Entity, client: Entity, kind: str, rate: float) -> Bucket:
        """Return the bucket that the client shares with the other clients of its user or client id."""
        now = self._clock.monotonic()
        shared = client[0] if entity[0] is not None else None, client[1] if entity[1] is not None else None
        key = entity, shared, kind
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= BUCKETS_MAX:
                self._drop_buckets(now)
            bucket = self._buckets[key] = Bucket(rate, now)
        elif bucket.rate != rate:
            bucket.change(rate, now)
        return bucket

    def _drop_buckets(self, now: float) -> None:
        """Drop the buckets of idle clients. If too many remain, drop the oldest ones."""
        for key in [key for key, bucket in self._buckets.items() if bucket.is_full(now)]:
            self._drop(key)
        for key in list(self._buckets)[: max(len(self._buckets) - BUCKETS_MAX + 1, 0)]:
            self._drop(key)

    def _drop(self, key: tuple[Entity, Entity, str]) -> None:
        entity, _, kind = key
        _add(self._dropped, (entity, kind), self._buckets.pop(key))

    def totals(self) -> Mapping[tuple[Entity, str], tuple[float, float]]:
        """Return by entity and kind: the amount charged, and the seconds of delay."""
        found = dict(self._dropped)
        for (entity, _, kind), bucket in self._buckets.items():
            _add(found, (entity, kind), bucket)
        return found


def _add(totals: dict[tuple[Entity, str], tuple[float, float]], key: tuple[Entity, str], bucket: Bucket) -> None:
    charged, delayed = totals.get(key, (0.0, 0.0))
    totals[key] = charged + bucket.charged, delayed + bucket.throttled_s


def _candidates(user: str | None, client_id: str | None) -> Iterator[Entity]:
    """Yield the entities that apply to a client, the most specific first."""
    clients = [client_id, DEFAULT] if client_id else [DEFAULT]
    for name in (user, DEFAULT) if user else (DEFAULT,):
        for client in clients:
            yield name, client
        yield name, None
    for client in clients:
        yield None, client


def _order(item: tuple[Entity, Quota]) -> tuple[bool, str, bool, str]:
    user, client_id = item[0]
    return user is None, user or "", client_id is not None, client_id or ""


def _nothing() -> None:
    pass
