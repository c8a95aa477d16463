"""What ``polywire serve`` is told.

Promises: values are checked before anything is opened. Must not know: how they are given (flags, environment, file), sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from polywire.broker.access import ANONYMOUS_NAME
from polywire.broker.settings import (
    HOUR_US,
    MEBI,
    RECORD_ROOM_BYTES,
    RETENTION_HOURS_MAX,
    RETENTION_MIB_MAX,
    BrokerSettings,
)
from polywire.errors import ErrorCode, Invalid
from polywire.log.settings import LogSettings
from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from polywire.protocols.kafka07.decoder import PAYLOAD_BYTES_MAX
from polywire.records.columns import BATCH_BYTES_MAX, HEADER_BYTES
from polywire.server.logins import LOGIN_WIRES
from polywire.server.machine import memory_bytes, reached_at
from polywire.server.prices import parse_prices
from polywire.types import DEFAULT_PARTITION_COUNT, PORT_DIGITS_MAX, PORT_MAX, SHARDS_MAX, Level, spell_address

OFF: Final = "off"
LOGFMT: Final = "logfmt"
DELETE_GRACE_S_MAX: Final = 30 * 24 * 3600  # a month of litter
AUTO: Final = "auto"  # recognised
EPOLL: Final = "epoll"  # drives plain connections, unless the event loop does
# Each is a field of ``ServeConfig``, by the name of its listener.
FLUX_REPLICATION_FACTOR_MAX: Final = 1_000  # replicas are listed
KAFKA_REPLICATION_FACTOR_MAX: Final = 32_767  # as the wire counts
FLUX_LINE_BYTES_MIN: Final = 1024  # the longest names take that much
WIRES: Final = ("flux", "cursus", "iggy", "kafka", "kafka07", "polywire")
CURSUS_IDLE_TIMEOUT_S: Final = 60.0  # the reference's
CACHE_MIB: Final = 512  # eight slots: a reader who is a second behind at full speed
CACHE_SHARE: Final = 4  # of the memory: a quarter
IDLE_POLL_US_MAX: Final = 10_000  # longer, and every slow request would keep a processor busy
HTTP: Final = "http"  # the listener of health, metrics, the admin API and the console
HTTP_ADDRESS: Final = "127.0.0.1:9080"
ANY: Final = "any"  # the listener that recognises the wire
TLS_SUFFIX: Final = "-tls"  # of the name of a wire's listener that speaks TLS
# Where wires without a login listen when nothing is said, as long as nobody has to log in (decision 0028).
USUAL: Final[Mapping[str, str]] = {"flux": "127.0.0.1:9092", "kafka07": "127.0.0.1:9093"}
STORED_AT_ONCE_BYTES: Final[Mapping[str, int]] = {
    "flux": MEBI + RECORD_ROOM_BYTES,  # a receive buffer of lines; as much may be what is kept of any wire's state
    "kafka": BATCH_BYTES_MAX,  # what a compressed batch may expand to
    "kafka07": max(PAYLOAD_BYTES_MAX, MEBI) + RECORD_ROOM_BYTES,
    "cursus": (BrokerSettings().transaction_batches_max + 1) * HEADER_BYTES + RECORD_ROOM_BYTES,  # a transaction's end
    "iggy": 10 * MEBI + 100 * 1024 + RECORD_ROOM_BYTES,  # payloads of one request, with the longest headers
    "polywire": BATCH_BYTES_MAX,
}
"""What the largest request that a wire documents makes the journal take as one group."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener listens; port 0 lets the system choose."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return spell_address(self.host, self.port)


def parse_address(text: str) -> Address | None:
    """``HOST:PORT``, an IPv6 host in brackets, or None for ``off``. Raises Invalid(INVALID_REQUEST)."""
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

    data_dir: everything the broker knows; made when missing, one broker per directory.
    flux, cursus, iggy, kafka, kafka07, polywire, any_wire: ``HOST:PORT`` or ``off`` per listener; port 0 lets the system choose. Without
        one, flux and kafka07, which have no login, listen where they usually do, and with users nowhere.
    http: the same for HTTP; without one it listens where it usually does, unless somebody else does.
    http_names: hosts by which browsers may reach HTTP of a broker without users, beside addresses and localhost, commas between.
    tls: ``HOST:PORT`` by wire, where it is spoken under TLS; needs a certificate, with which ``any_wire`` recognises TLS as well.
    tls_certificate, tls_key: PEM files, the certificate with its chain; without a key the certificate's file holds it.
    tls_client_authority: PEM file of who signs the certificates that peers under TLS must then have.
    tls_machine_authority: PEM file of who signs the certificates of the bucket's machines; links between them are under TLS then.
    ready_file: written once all listeners accept, removed when they do no longer.
    durability: least level of any acknowledgement, ``written`` or ``synced``; with a bucket always ``stored``.
    bucket: URL of the bucket that holds the log; nothing where the data directory does.
    node: name of this broker among those of the bucket; without one the machine's.
    advertise: host by which other brokers of the bucket reach this one; without one where it listens, or the machine's name.
    cache_gib: of segments that are kept in the data directory beside the bucket.
    cache_mib: of what was sealed last, kept in memory; a quarter of the machine's or the container's at most.
    bucket_prices: what the store asks for 1,000 requests of a kind, ``put=0.005,get=0.0004``; nothing where nobody has told.
    delete_grace_s: how long what no record of the log needs any more stays in the bucket, for queries that were planned.
    users: file of the users who may log in (``server.users``); without one the broker is open, or keeps the users it was given before.
    insecure: whether it may listen beyond this machine although nobody has to log in, or passwords travel as they are.
    driver: of plain connections, ``epoll`` or the event loop itself, ``loop``; ``auto`` takes the first where the system has it.
    log_format: of the lines on standard error, ``logfmt`` or ``json``.
    audit_log: file that logins, refusals and administration are appended to, besides the log.
    partition_count: of topics made automatically.
    processes: how many have the data directory's topics between them (decision 0072), or the bucket's (decision 0075); 0 for one, or as many
        as the bucket has shards.
    shard_port: first port where each of several processes is reached alone, 20 for each; 0: on a directory the shared port and 100 for each,
        in a bucket as the system chooses.
    balance_s: how long a machine must have stood by before a shard that it should lead is handed to it; 0 for never.
    drain_timeout_s: how long owed answers may hold up a stop.
    slot_bytes, slot_count_min, slot_count_max, sync_interval_ms: of the journal; without one the log's own default counts.
    scrub_hours: every stored segment is verified once in so many hours; 0 for never.
    retention_hours: how long topics without a setting of their own keep records; 0 for ever.
    retention_mib: how much each partition of such a topic keeps; 0 sets no limit.
    offsets_retention_hours: how long positions that nobody uses are kept; 0 for ever.
    state_mib, owner_share: what may be kept for peers beside records, and the share of it that one user or address may have.
    idle_poll_us: how long the loop looks for more bytes before it sleeps, while requests follow each other that quickly (decision 0008).
    flux_admin: whether the FLUX wire's admin commands are known.
    flux_strict_leaders: whether topics made by the FLUX wire begin without leaders.
    flux_pipes: whether keys and values that come over the FLUX wire may hold pipes, as with its own broker; without it a line has the four
    sections of its page and no more.
    flux_replication_factor: replicas of a topic on the FLUX wire that is given no factor of its own, the leader among them.
    flux_min_isr: replicas in sync, the leader among them, that acks=all of the FLUX wire waits for; no more than that factor.
    flux_exports: whether groups.json and offsets.json in the data directory tell of the FLUX wire's groups, where this wire is spoken.
    flux_line_bytes_max: of a request on the FLUX wire, its line ending included; 1 KiB to 1 MiB.
    cursus_dialect: the one dialect the Cursus wire speaks, ``auto`` recognises it.
    cursus_compression: what every frame to the Cursus wire is compressed with, ``auto`` looks at each.
    cursus_idle_timeout_s: how long a connection of the Cursus wire without a stream may say nothing.
    cursus_dedup_minutes: how long the legacy dialect of the Cursus wire drops a payload that its topic has had; 0 for never.
    kafka_advertise: ``HOST:PORT`` by which clients of the Kafka wire reach this broker, ``auto``: where each has connected to. Several
        processes have the host, and ports of their own.
    kafka_acks_all: what acks=all of the Kafka wire means, ``written`` or ``synced``.
    kafka_replication_factor_max: how many copies clients of the Kafka wire may ask for when they make a topic; one is kept.
    kafka07_zookeeper: where the Kafka 0.7 wire is registered, ``HOST:PORT/chroot``, or ``off``.
    iggy_dialect: the one dialect the Iggy wire speaks, ``auto`` recognises it.
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
    durability: Level = Level.WRITTEN
    bucket: str = ""
    node: str = ""
    advertise: str = ""
    cache_gib: float = 20.0
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
    slot_bytes: int | None = None
    slot_count_min: int | None = None
    slot_count_max: int | None = None
    sync_interval_ms: int | None = None
    idle_poll_us: int = 100
    retention_hours: float = 0.0
    scrub_hours: float = 168.0
    retention_mib: int = 0
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
        """What the broker is built with. Raises Invalid for what it cannot be."""
        return BrokerSettings(
            durability=Level.STORED if self.bucket else self.durability,
            partition_count=self.partition_count,
            retention_age_us=int(self.retention_hours * HOUR_US),
            retention_bytes=self.retention_mib * MEBI,
            positions_expiry_us=int(self.offsets_retention_hours * HOUR_US),
            state_bytes_max=self.state_mib * MEBI,
            owner_share=self.owner_share,
        )

    def log_settings(self) -> LogSettings:
        """Sizes of the journal, where they were given."""
        usual = LogSettings()
        return LogSettings(
            slot_bytes=self.slot_bytes or usual.slot_bytes,
            slot_count_min=self.slot_count_min or usual.slot_count_min,
            slot_count_max=self.slot_count_max or usual.slot_count_max,
            sync_interval_ms=self.sync_interval_ms or usual.sync_interval_ms,
            scrub_hours=self.scrub_hours,
            cache_bytes=min(self.cache_mib * MEBI, memory_bytes() // CACHE_SHARE) // max(self.processes, 1),
        )

    def reached_at(self, address: Address) -> str:
        """By which host others reach a listener of this machine."""
        return self.advertise or reached_at(address.host)

    def listeners(self) -> Mapping[str, Address]:
        """Addresses by listener name, those switched off left out.

        Raises Invalid(INVALID_REQUEST) for a malformed address, for one beyond this machine where nobody has to log in, unless
        ``insecure``, when none is left, for a number out of range, and for a durability below ``written``.
        """
        parse_prices(self.bucket_prices)
        for name, value, limit in (
            ("idle_poll_us", self.idle_poll_us, IDLE_POLL_US_MAX),
            ("retention_hours", self.retention_hours, RETENTION_HOURS_MAX),
            ("offsets_retention_hours", self.offsets_retention_hours, RETENTION_HOURS_MAX),
            ("scrub_hours", self.scrub_hours, RETENTION_HOURS_MAX),
            ("cache_gib", self.cache_gib, RETENTION_MIB_MAX),
            ("cache_mib", self.cache_mib, RETENTION_MIB_MAX),
            ("delete_grace_s", self.delete_grace_s, DELETE_GRACE_S_MAX),
            ("balance_s", self.balance_s, DELETE_GRACE_S_MAX),
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
        if self.flux_line_bytes_max < FLUX_LINE_BYTES_MIN:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"flux_line_bytes_max is too small got={self.flux_line_bytes_max} least={FLUX_LINE_BYTES_MIN}",
            )
        if not 1 <= self.flux_min_isr <= self.flux_replication_factor <= FLUX_REPLICATION_FACTOR_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"flux_min_isr is not between 1 and the replication factor got={self.flux_min_isr}"
                f" factor={self.flux_replication_factor} limit={FLUX_REPLICATION_FACTOR_MAX}",
            )
        if self.durability is Level.MEMORY:
            raise Invalid(ErrorCode.INVALID_REQUEST, "durability is invalid (use written or synced) got=memory")
        given = {**{wire: self.address_of(wire) for wire in WIRES}, ANY: self.any_wire}
        given |= {wire + TLS_SUFFIX: text for wire, text in self.tls.items()}
        addresses = {name: address for name, text in given.items() if (address := parse_address(text)) is not None}
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
        """Where a wire listens: as given, or the usual place."""
        given: str | None = getattr(self, wire)
        return USUAL[wire] if given is None else given

    def served(self, *, has_users: bool, has_anonymous: bool) -> Mapping[str, Address]:
        """The listeners of a broker whose users are known: with users, wires without a login only where they were asked for by name.

        Raises Invalid(INVALID_REQUEST) when nobody could do anything there, and as ``listeners``.
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

    def _check_machines(self) -> None:
        """Machines show each other a certificate, where there are to be several."""
        if self.tls_machine_authority is not None and (self.tls_certificate is None or not self.bucket):
            missing = "a certificate (--tls-certificate)" if self.bucket else "a bucket (--bucket)"
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"--tls-machine-authority needs {missing} authority={self.tls_machine_authority}",
            )

    def _check_slots(self, name: str) -> None:
        """What a wire may be sent must fit one journal file."""
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
        """Beyond this machine only those who log in under TLS, or have a certificate of their own, are served."""
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
        """Whether the listener for all wires takes them without TLS, too."""
        address = parse_address(self.any_wire)
        return address is None or self.insecure or address.is_loopback

    def speaks(self, wire: str, *, has_users: bool) -> bool:
        """Whether this wire is spoken anywhere, on a listener of its own or on the one for all of them."""
        addresses = self.served(has_users=has_users, has_anonymous=True)
        any_wires = self.any_wires(has_users=has_users)
        anywhere = ANY in addresses and (any_wires is None or wire in any_wires)
        return anywhere or wire in addresses or wire + TLS_SUFFIX in addresses

    def any_wires(self, *, has_users: bool = False) -> frozenset[str] | None:
        """The wires that the listener for all of them recognises; None: every one."""
        address = parse_address(self.any_wire)
        if address is None or self.insecure or address.is_loopback:
            asked_for = LOGIN_WIRES.union(wire for wire in USUAL if getattr(self, wire) not in (None, OFF))
            return asked_for if address is not None and has_users else None
        return LOGIN_WIRES
