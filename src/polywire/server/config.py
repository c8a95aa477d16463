"""The settings of ``polywire serve``, and checks that need no data directory or network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from math import isfinite
from pathlib import Path
from typing import Final

import msgspec

from polywire.broker.access import ANONYMOUS_NAME
from polywire.broker.client_quotas import parse_quotas
from polywire.broker.id_tokens import Provider
from polywire.broker.settings import (
    HOUR_US,
    MEBI,
    RECORD_ROOM_BYTES,
    RETENTION_HOURS_MAX,
    RETENTION_MIB_MAX,
    BrokerSettings,
    TableFormat,
)
from polywire.errors import ErrorCode, Invalid
from polywire.http.process import PRICED_REQUESTS
from polywire.log.settings import LogSettings
from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from polywire.protocols.kafka07.decoder import PAYLOAD_BYTES_MAX
from polywire.records.columns import BATCH_BYTES_MAX, HEADER_BYTES
from polywire.server.logins import LOGIN_WIRES
from polywire.server.resources import MemoryShares, memory_bytes, memory_shares, reached_at
from polywire.store.metered import Charge
from polywire.types import (
    DEFAULT_PARTITION_COUNT,
    NODE_TIMEOUT_S,
    NODE_TIMEOUT_S_MAX,
    NODE_TIMEOUT_S_MIN,
    PORT_DIGITS_MAX,
    PORT_MAX,
    SHARDS_MAX,
    Level,
    spell_address,
)

PRICE_MAX: Final = 1_000.0  # a larger price is a typing error
_KINDS: Final = {charge.value: charge for charge in Charge}
OFF: Final = "off"
LOGFMT: Final = "logfmt"
DELETE_GRACE_S_MAX: Final = 30 * 24 * 3600  # a month of deleted segments
AUTO: Final = "auto"  # the broker detects the value
EPOLL: Final = "epoll"
FLUX_REPLICATION_FACTOR_MAX: Final = 1_000  # limit because FLUX responses list all replicas
KAFKA_REPLICATION_FACTOR_MAX: Final = 32_767  # an int16 in the protocol
FLUX_LINE_BYTES_MIN: Final = 1024  # fits the longest names
TABLES: Final = "tables"  # directory of all tables in the data directory or bucket
WIRES: Final = (
    "flux",
    "cursus",
    "iggy",
    "kafka",
    "kafka07",
    "polywire",
)  # fields of ``ServeConfig``, and names of listeners
CURSUS_IDLE_TIMEOUT_S: Final = 60.0  # as in the original broker
CACHE_MIB: Final = 512  # eight journal files: enough for a consumer that lags by a second at full speed
MEMORY_MIB_MIN: Final = 256  # what a process needs with the smallest journal files
# limit because the broker would use a whole processor while clients wait for slow requests
IDLE_POLL_US_MAX: Final = 10_000
HTTP: Final = "http"  # the listener of health, metrics, the admin API and the console
HTTP_ADDRESS: Final = "127.0.0.1:9080"
ANY: Final = "any"  # the listener that detects the protocol of each connection
TLS_SUFFIX: Final = "-tls"  # suffix of the name of a listener with TLS
# Default addresses of protocols without a login, while no users are configured (decision 0115).
USUAL: Final[Mapping[str, str]] = {"flux": "127.0.0.1:9092", "kafka07": "127.0.0.1:9093"}
_TLS_FILE: Final = "read again, for new connections"
RELOADED: Final[Mapping[str, str]] = {
    "users": "read again; ends the logins of users who were removed or have a new password",
    "tls-certificate": _TLS_FILE,
    "tls-key": _TLS_FILE,
    "tls-client-authority": _TLS_FILE,
    "tls-machine-authority": _TLS_FILE,
    "oidc-keys": "read again, for new logins",
    "audit-log": "opened again",
    "quotas": "read again, if the settings file has them; those set at run time remain",
}
"""The effect of SIGHUP on each setting or its file. The broker reads all other settings only at its start."""
STORED_AT_ONCE_BYTES: Final[Mapping[str, int]] = {
    # a receive buffer of lines; this is also enough for the stored state of any protocol
    "flux": MEBI + RECORD_ROOM_BYTES,
    "kafka": BATCH_BYTES_MAX,  # limit for a batch after decompression
    "kafka07": max(PAYLOAD_BYTES_MAX, MEBI) + RECORD_ROOM_BYTES,
    # a request that ends a transaction with the maximum number of batches
    "cursus": (BrokerSettings().transaction_batches_max + 1) * HEADER_BYTES + RECORD_ROOM_BYTES,
    "iggy": 10 * MEBI + 100 * 1024 + RECORD_ROOM_BYTES,  # the values of one request, with headers of maximum size
    "polywire": BATCH_BYTES_MAX,
}
"""By protocol, the size of the journal write that the largest allowed request causes."""


def parse_prices(text: str) -> Mapping[Charge, float]:
    """Parse ``put=0.005,get=0.0004`` into prices by kind of request. Kinds that are not named are free.

    Raises Invalid(INVALID_REQUEST) for another text.
    """
    prices: dict[Charge, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        charge = _KINDS.get(name.strip())
        if charge is None or charge in prices:
            problem = "named twice" if charge is not None else f"none of {', '.join(_KINDS)}"
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"bucket prices are invalid (use put=0.005,get=0.0004): kind {name[:40]!r} is {problem}",
            )
        prices[charge] = _price(value, part)
    return prices


def _price(value: str, part: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = -1.0
    if not (isfinite(price) and 0 <= price <= PRICE_MAX):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"price is not a number from 0 to {PRICE_MAX:g} for {PRICED_REQUESTS} requests got={part[:40]!r}",
        )
    return price


class Address(msgspec.Struct, frozen=True):
    """The address of a listener. If the port is 0, the system chooses it."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only clients on this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return spell_address(self.host, self.port)


def parse_address(text: str) -> Address | None:
    """Parse ``HOST:PORT``, or return None for ``off``. An IPv6 host is written in brackets.

    Raises Invalid(INVALID_REQUEST) for another text.
    """
    if text == OFF:
        return None
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"address is invalid (use HOST:PORT or off) got={text!r}")
    if len(port) > PORT_DIGITS_MAX or int(port) > PORT_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"port is above {PORT_MAX} got={text!r}")
    return Address(host, int(port))


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Settings of one broker process.

    Listeners and their security:

    * ``flux``, ``cursus``, ``iggy``, ``kafka``, ``kafka07``, ``polywire``, ``any_wire``: ``HOST:PORT`` or ``off`` for
      each listener; with port 0 the system chooses the port. If ``flux`` or ``kafka07`` is not set, it has a default
      address; with users it is off, because the protocol has no login.
    * ``http``: the same for HTTP. If it is not set, it has a default address, and is off if that port is in use.
    * ``http_names``: host names, separated by commas, that HTTP accepts while there are no users, in addition to
      addresses and localhost.
    * ``tls``: ``HOST:PORT`` by protocol for listeners with TLS. They need a certificate; ``any_wire`` then also detects
      TLS.
    * ``tls_certificate``, ``tls_key``: PEM files; the first has the certificate with its chain, and the key if
      ``tls_key`` is not set.
    * ``tls_client_authority``: PEM file of the CA that must have signed the certificates of clients.
    * ``tls_machine_authority``: PEM file of the CA for the machines of a bucket; they then use mutual TLS between each
      other.
    * ``users``: users file (``server.users``). Without one, authentication is off unless the broker has stored users.
    * ``oidc_issuer``, ``oidc_audience``, ``oidc_keys``, ``oidc_user_claim``: provider whose tokens are accepted as logins
      (``broker.id_tokens``).
    * ``insecure``: allow non-loopback addresses without authentication, or with passwords in clear text.
    * ``quotas``: quotas of users and client ids, such as ``user=alice produce=1MB; client-id=* requests=100``; those
      changed at run time take precedence (``broker.client_quotas``).
    * ``reread_quotas``: reads the quotas of the settings file again; None if they are not in the file.
    * ``audit_log``: file for audit events, which are also in the log.

    Storage:

    * ``data_dir``: data directory, created if missing. Only one broker at a time can use it.
    * ``durability``: minimum durability level of an acknowledgement, ``written`` or ``synced``; with a bucket always
      ``stored``.
    * ``slot_bytes``, ``slot_count_min``, ``slot_count_max``, ``sync_interval_ms``: settings of the journal. If they are
      not set, the log's defaults apply.
    * ``scrub_hours``: interval for verifying all stored segments; 0 disables it.
    * ``retention_hours``: default retention time of topics; 0 for no limit.
    * ``retention_mib``: default retention size of each partition; 0 for no limit.
    * ``offsets_retention_hours``: hours after which unused committed offsets expire; 0 for never.
    * ``table``, ``table_freshness_s``, ``table_history_hours``: tables of topics without their own settings (concepts:
      tables).
    * ``tables_url``: URL below which tables are written; by default ``tables`` in the bucket or the data directory.
    * ``partition_count``: partition count of topics that are created automatically.
    * ``memory_mib``: memory that all processes together may use, of which the following sizes are at most fixed shares;
      0 for the memory of the machine or container.
    * ``cache_mib``: size of the memory cache of the latest segments; at most a quarter of the memory.
    * ``state_mib``, ``owner_share``: memory limit for groups, offsets, writers and protocol state, at most an eighth of
      the memory, and the share of it that one user or address can use.

    Bucket:

    * ``bucket``: URL of the bucket that stores the log. If it is empty, the data directory stores the log.
    * ``node``: name of this broker among the brokers of the bucket; by default the host name.
    * ``advertise``: host at which other brokers of the bucket reach this one; by default the host of its listeners, or
      the host name.
    * ``cache_gib``: size of the cache of segments on disk.
    * ``bucket_prices``: price of 1,000 requests by kind, ``put=0.005,get=0.0004``; empty for none.
    * ``delete_grace_s``: seconds to keep deleted segments in the bucket, so that running queries can finish.
    * ``node_timeout_s``: seconds without a heartbeat after which a standby takes over from this broker.
    * ``balance_s``: seconds a preferred standby must be healthy before it takes over its shard; 0 disables rebalancing.

    Process:

    * ``processes``: number of processes that share the data directory or the bucket (decision 0126). 0 stands for one
      process, or one for each shard of the bucket.
    * ``shard_port``: first port for listeners that belong to a single process; each process gets 20 ports. With 0, the
      system chooses the ports for a bucket. On a data directory, the first process then uses the shared port plus 100,
      the second the shared port plus 200, and so on.
    * ``ready_file``: file that exists while all listeners accept connections.
    * ``drain_timeout_s``: seconds to wait for pending responses at shutdown.
    * ``driver``: I/O driver of connections without TLS: ``epoll``, ``loop`` (the event loop), or ``auto``, which uses
      epoll if it is available.
    * ``log_format``: format of log lines, ``logfmt`` or ``json``.
    * ``idle_poll_us``: microseconds to poll for more requests before sleeping while the broker is busy (decision 0112).

    Protocols:

    * ``flux_admin``: enable the admin commands of FLUX.
    * ``flux_strict_leaders``: topics created over FLUX have no leaders at first.
    * ``flux_pipes``: FLUX keys and values can contain pipes, as in the original broker. Otherwise a line has four
      sections.
    * ``flux_replication_factor``: default replication factor of FLUX topics, including the leader.
    * ``flux_min_isr``: in-sync replicas, including the leader, that acks=all of FLUX waits for; at most the replication
      factor.
    * ``flux_exports``: write groups.json and offsets.json to the data directory while FLUX is on.
    * ``flux_line_bytes_max``: maximum length of a FLUX request with its line ending, from 1 KiB to 1 MiB.
    * ``cursus_dialect``: dialect of Cursus; ``auto`` detects it.
    * ``cursus_compression``: compression of frames that Cursus clients send; ``auto`` detects it for each frame.
    * ``cursus_idle_timeout_s``: seconds after which an idle Cursus connection without a stream is closed.
    * ``cursus_dedup_minutes``: minutes for which the legacy dialect of Cursus drops duplicate payloads of a topic; 0
      disables it.
    * ``kafka_advertise``: ``HOST:PORT`` that Kafka clients connect to. ``auto`` is the address that each client used.
      With several processes, only the host is used.
    * ``kafka_acks_all``: what acks=all of Kafka waits for, ``written`` or ``synced``.
    * ``kafka_replication_factor_max``: highest replication factor that Kafka clients can request; topics get one
      replica.
    * ``kafka07_zookeeper``: ZooKeeper in which to register Kafka 0.7, ``HOST:PORT/chroot``, or ``off``.
    * ``iggy_dialect``: dialect of Iggy; ``auto`` detects it.
    """

    data_dir: Path = Path("polywire-data")
    flux: str | None = None
    cursus: str = "127.0.0.1:9000"
    kafka: str = "127.0.0.1:9094"
    kafka07: str | None = None
    iggy: str = "127.0.0.1:8090"
    polywire: str = "127.0.0.1:9555"
    any_wire: str = OFF
    http: str | None = None
    http_names: str = ""
    tls: Mapping[str, str] = field(default_factory=dict)
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_authority: Path | None = None
    tls_machine_authority: Path | None = None
    ready_file: Path | None = None
    users: Path | None = None
    quotas: str = ""
    reread_quotas: Callable[[], str] | None = None
    oidc_issuer: str = ""
    oidc_audience: str = ""
    oidc_keys: str = ""
    oidc_user_claim: str = "sub"
    durability: Level = Level.WRITTEN
    bucket: str = ""
    node: str = ""
    advertise: str = ""
    cache_gib: float = 20.0
    memory_mib: int = 0
    cache_mib: int = CACHE_MIB
    delete_grace_s: float = 900.0
    bucket_prices: str = ""
    insecure: bool = False
    audit_log: Path | None = None
    partition_count: int = DEFAULT_PARTITION_COUNT
    drain_timeout_s: float = 5.0
    processes: int = 0
    shard_port: int = 0
    balance_s: float = 30.0
    node_timeout_s: float = NODE_TIMEOUT_S
    slot_bytes: int | None = None
    slot_count_min: int | None = None
    slot_count_max: int | None = None
    sync_interval_ms: int | None = None
    idle_poll_us: int = 100
    retention_hours: float = 0.0
    scrub_hours: float = 168.0
    retention_mib: int = 0
    table: TableFormat = TableFormat.NONE
    table_freshness_s: int = 60
    table_history_hours: int = 168
    tables_url: str = ""
    offsets_retention_hours: float = 168.0
    state_mib: int = 256
    owner_share: float = 0.5
    cursus_dialect: str = AUTO
    cursus_compression: str = AUTO
    cursus_idle_timeout_s: float = CURSUS_IDLE_TIMEOUT_S
    cursus_dedup_minutes: float = 0.0
    flux_admin: bool = True
    flux_strict_leaders: bool = False
    flux_pipes: bool = True
    flux_replication_factor: int = 3
    flux_min_isr: int = 2
    flux_exports: bool = True
    flux_line_bytes_max: int = LINE_BYTES_MAX
    kafka_advertise: str = AUTO
    kafka_acks_all: Level = Level.SYNCED
    kafka_replication_factor_max: int = 1
    kafka07_zookeeper: str = OFF
    iggy_dialect: str = AUTO
    driver: str = AUTO
    log_format: str = LOGFMT

    def broker_settings(self) -> BrokerSettings:
        """Return the settings of the broker. Raises Invalid if one is out of range."""
        return BrokerSettings(
            durability=Level.STORED if self.bucket else self.durability,
            partition_count=self.partition_count,
            quotas=parse_quotas(self.quotas),
            retention_age_us=int(self.retention_hours * HOUR_US),
            retention_bytes=self.retention_mib * MEBI,
            table=self.table,
            table_freshness_s=self.table_freshness_s,
            table_history_hours=self.table_history_hours,
            tables_url=self.tables_at,
            positions_expiry_us=int(self.offsets_retention_hours * HOUR_US),
            state_bytes_max=min(self.state_mib * MEBI, self.memory.state),
            owner_share=self.owner_share,
        )

    @property
    def tables_at(self) -> str:
        """The URL below which tables are written. Raises Invalid(INVALID_REQUEST) if it is not a bucket's."""
        if self.tables_url:
            from polywire.store.url import check_bucket_url

            check_bucket_url(self.tables_url)
            return self.tables_url.rstrip("/")
        return f"{self.bucket.rstrip('/') or self.data_dir.absolute().as_uri()}/{TABLES}"

    def log_settings(self) -> LogSettings:
        """Return the settings of the log. Those that are not set have the log's defaults."""
        default, memory = LogSettings(), self.memory
        # smaller if memory is short, but sufficient for every protocol
        least_mib = -(-LogSettings.slot_bytes_for(max(STORED_AT_ONCE_BYTES.values())) // MEBI)
        slot_bytes_max = max(memory.journal_file // MEBI, least_mib) * MEBI
        return LogSettings(
            slot_bytes=min(self.slot_bytes or default.slot_bytes, slot_bytes_max),
            slot_count_min=self.slot_count_min or default.slot_count_min,
            slot_count_max=self.slot_count_max or default.slot_count_max,
            sync_interval_ms=self.sync_interval_ms or default.sync_interval_ms,
            scrub_hours=self.scrub_hours,
            cache_bytes=min(self.cache_mib * MEBI // max(self.processes, 1), memory.cache),
        )

    @property
    def memory(self) -> MemoryShares:
        """Limits for the parts of one process's memory."""
        return memory_shares(self.memory_mib * MEBI or memory_bytes(), processes=self.processes)

    def reached_at(self, address: Address) -> str:
        """Return the host at which other machines reach a listener."""
        return self.advertise or reached_at(address.host)

    def listeners(self) -> Mapping[str, Address]:
        """Return the addresses of all enabled listeners, by name.

        Raises Invalid(INVALID_REQUEST) for a malformed address, and for an insecure address unless ``insecure`` is set.
        Also raises it if all listeners are off, or another setting is out of range.
        """
        parse_prices(self.bucket_prices)
        parse_quotas(self.quotas)
        self._check_provider()
        self._check_numbers()
        if not 1 <= self.flux_min_isr <= self.flux_replication_factor <= FLUX_REPLICATION_FACTOR_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"flux_min_isr is not between 1 and the replication factor got={self.flux_min_isr}"
                f" factor={self.flux_replication_factor} limit={FLUX_REPLICATION_FACTOR_MAX}",
            )
        if self.durability is Level.MEMORY:
            raise Invalid(ErrorCode.INVALID_REQUEST, "durability is invalid (use written or synced) got=memory")
        texts = {**{wire: self.address_of(wire) for wire in WIRES}, ANY: self.any_wire}
        texts |= {wire + TLS_SUFFIX: text for wire, text in self.tls.items()}
        addresses = {name: address for name, text in texts.items() if (address := parse_address(text)) is not None}
        if not addresses and self.http in (None, OFF):
            raise Invalid(ErrorCode.INVALID_REQUEST, "all listeners are off (enable at least one)")
        http = parse_address(HTTP_ADDRESS if self.http is None else self.http)
        if http is not None:
            addresses[HTTP] = http
        for name, address in addresses.items():
            self._check_reach(name, address)
            if name.endswith(TLS_SUFFIX) and self.tls_certificate is None:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST, f"a TLS listener needs a certificate (--tls-certificate) listener={name}"
                )
            self._check_slots(name)
        self._check_machines()
        return addresses

    def address_of(self, wire: str) -> str:
        """Return the configured or default address of a protocol's listener."""
        configured: str | None = getattr(self, wire)
        return USUAL[wire] if configured is None else configured

    def served(self, *, has_users: bool, has_anonymous: bool) -> Mapping[str, Address]:
        """Return the listeners to open. With users, protocols without a login are off unless their address is set.

        Raises the errors of ``listeners``, and Invalid(INVALID_REQUEST) for a protocol without a login if there is no
        user ``anonymous``.
        """
        addresses = dict(self.listeners())
        if not has_users:
            return addresses
        for wire in USUAL:
            if getattr(self, wire) is None:
                addresses.pop(wire, None)
            certified = self.tls_client_authority is not None
            nameless = [name for name in (wire, wire + TLS_SUFFIX) if name in addresses]
            if nameless and not has_anonymous and not (certified and nameless == [wire + TLS_SUFFIX]):
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"{wire} has no login, and its clients would act as the user {ANONYMOUS_NAME!r}, which does not exist"
                    f" (run polywire user add {ANONYMOUS_NAME} --permissions ..., or remove --{wire})",
                )
        if not addresses.keys() - {HTTP}:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "all listeners are off: protocols without a login are off when users are configured",
            )
        return addresses

    @property
    def provider(self) -> Provider | None:
        """Return the provider whose tokens are accepted as logins; None if there is none."""
        if not (self.oidc_issuer or self.oidc_audience or self.oidc_keys):
            return None
        return Provider(self.oidc_issuer, self.oidc_audience, self.oidc_keys, self.oidc_user_claim)

    def _check_provider(self) -> None:
        provider = self.provider
        if provider is not None:
            provider.check()
            if self.users is None:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST, "logins with tokens need --users, because a token names one of the users"
                )

    def _check_numbers(self) -> None:
        for name, value, limit in (
            ("idle_poll_us", self.idle_poll_us, IDLE_POLL_US_MAX),
            ("retention_hours", self.retention_hours, RETENTION_HOURS_MAX),
            ("offsets_retention_hours", self.offsets_retention_hours, RETENTION_HOURS_MAX),
            ("scrub_hours", self.scrub_hours, RETENTION_HOURS_MAX),
            ("cache_gib", self.cache_gib, RETENTION_MIB_MAX),
            ("memory_mib", self.memory_mib, RETENTION_MIB_MAX),
            ("cache_mib", self.cache_mib, RETENTION_MIB_MAX),
            ("delete_grace_s", self.delete_grace_s, DELETE_GRACE_S_MAX),
            ("balance_s", self.balance_s, DELETE_GRACE_S_MAX),
            ("node_timeout_s", self.node_timeout_s, NODE_TIMEOUT_S_MAX),
            ("drain_timeout", self.drain_timeout_s, DELETE_GRACE_S_MAX),
            ("shard_port", self.shard_port, PORT_MAX - 20 * SHARDS_MAX),
            ("retention_mib", self.retention_mib, RETENTION_MIB_MAX),
            ("flux_line_bytes_max", self.flux_line_bytes_max, MEBI),
            ("kafka_replication_factor_max", self.kafka_replication_factor_max, KAFKA_REPLICATION_FACTOR_MAX),
        ):
            if not 0 <= value <= limit:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST, f"setting is out of range name={name} value={value} limit={limit}"
                )
        if 0 < self.memory_mib < MEMORY_MIB_MIN * max(self.processes, 1):
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"memory_mib is too small: use {MEMORY_MIB_MIN} or more for each process, or 0 for all memory"
                f" got={self.memory_mib} processes={max(self.processes, 1)}",
            )
        if self.node_timeout_s < NODE_TIMEOUT_S_MIN:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"node_timeout_s is too small got={self.node_timeout_s} least={NODE_TIMEOUT_S_MIN}",
            )
        if self.flux_line_bytes_max < FLUX_LINE_BYTES_MIN:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"flux_line_bytes_max is too small got={self.flux_line_bytes_max} least={FLUX_LINE_BYTES_MIN}",
            )

    def _check_machines(self) -> None:
        if self.tls_machine_authority is not None and (self.tls_certificate is None or not self.bucket):
            missing = "a certificate (--tls-certificate)" if self.bucket else "a bucket (--bucket)"
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"--tls-machine-authority needs {missing} authority={self.tls_machine_authority}",
            )

    def _check_slots(self, name: str) -> None:
        """Check that the largest request of a protocol fits one journal file."""
        if name.removesuffix(TLS_SUFFIX) == HTTP:
            return
        wires = self.any_wires() or WIRES if name == ANY else (name.removesuffix(TLS_SUFFIX),)
        wire = max(wires, key=STORED_AT_ONCE_BYTES.__getitem__)
        slot_bytes_min = LogSettings.slot_bytes_for(STORED_AT_ONCE_BYTES[wire])
        if self.slot_bytes is not None and self.slot_bytes < slot_bytes_min:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"journal files are too small for the largest request of {wire} (use --slot-mib"
                f" {-(-slot_bytes_min // MEBI)} or more, or turn {wire} off) bytes={self.slot_bytes}",
            )

    def _check_reach(self, name: str, address: Address) -> None:
        """Check that clients on other machines must log in over TLS, or present a certificate."""
        if (
            self.insecure
            or address.is_loopback
            or (name.endswith(TLS_SUFFIX) and self.tls_client_authority is not None)
        ):
            return
        is_secret = name.endswith(TLS_SUFFIX) or (name == ANY and self.tls_certificate is not None)
        name = name.removesuffix(TLS_SUFFIX)
        if self.users is None:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "listening on other than loopback addresses needs --users or --insecure, because no users are configured"
                f" listener={name} address={address}",
            )
        if name not in (ANY, HTTP) and name not in LOGIN_WIRES:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "listening on other than loopback addresses needs --insecure, because this protocol has no login"
                f" listener={name} address={address}",
            )
        if not is_secret:
            instead = "--tls-certificate" if name == ANY else f"--{name}-tls"
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"listening on other than loopback addresses needs TLS ({instead}) or --insecure,"
                " because passwords would be sent in clear text"
                f" listener={name} address={address}",
            )

    @property
    def any_plain(self) -> bool:
        """Whether the listener that detects protocols also accepts connections without TLS."""
        address = parse_address(self.any_wire)
        return address is None or self.insecure or address.is_loopback

    def speaks(self, wire: str, *, has_users: bool) -> bool:
        """Return whether any listener accepts a protocol."""
        addresses = self.served(has_users=has_users, has_anonymous=True)
        any_wires = self.any_wires(has_users=has_users)
        anywhere = ANY in addresses and (any_wires is None or wire in any_wires)
        return anywhere or wire in addresses or wire + TLS_SUFFIX in addresses

    def any_wires(self, *, has_users: bool = False) -> frozenset[str] | None:
        """Return the protocols that the detecting listener accepts; None means all."""
        address = parse_address(self.any_wire)
        if address is None or self.insecure or address.is_loopback:
            enabled = LOGIN_WIRES.union(wire for wire in USUAL if getattr(self, wire) not in (None, OFF))
            return enabled if address is not None and has_users else None
        return LOGIN_WIRES
