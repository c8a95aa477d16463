"""What ``polywire serve`` is told.

Promises: values are checked before anything is opened. Must not know: how they are given (flags, environment, file), sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from polywire.broker.settings import HOUR_US, RECORD_ROOM_BYTES, BrokerSettings
from polywire.errors import ErrorCode, Invalid
from polywire.log.settings import LogSettings
from polywire.protocols.kafka07.codec import PAYLOAD_BYTES_MAX
from polywire.records.columns import BATCH_BYTES_MAX, HEADER_BYTES
from polywire.types import DEFAULT_PARTITION_COUNT, Level

MEBI: Final = 1024 * 1024
OFF: Final = "off"
AUTO: Final = "auto"  # recognised
# Each is a field of ``ServeConfig``, by the name of its listener.
WIRES: Final = ("flux", "cursus", "iggy", "kafka07", "polywire")
CURSUS_IDLE_TIMEOUT_S: Final = 60.0  # the reference's
RETENTION_HOURS_MAX: Final = 1_000_000  # more than a century; microseconds of it fit 64 bits
RETENTION_MIB_MAX: Final = 2**40  # more than any disk
IDLE_POLL_US_MAX: Final = 10_000  # longer, and every slow request would keep a processor busy
ANY: Final = "any"  # the listener that recognises the wire
TLS_SUFFIX: Final = "-tls"  # of the name of a wire's listener that speaks TLS
LOGIN_WIRES: Final = frozenset({"cursus", "iggy", "polywire"})  # those with words for a login
STORED_AT_ONCE_BYTES: Final[Mapping[str, int]] = {
    "flux": MEBI + RECORD_ROOM_BYTES,  # a receive buffer of lines; as much may be what is kept of any wire's state
    "kafka07": max(PAYLOAD_BYTES_MAX, MEBI) + RECORD_ROOM_BYTES,
    "cursus": (BrokerSettings().transaction_messages_max + 1) * HEADER_BYTES + RECORD_ROOM_BYTES,  # a transaction's end
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
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address | None:
    """``HOST:PORT``, an IPv6 host in brackets, or None for ``off``. Raises Invalid(INVALID_REQUEST)."""
    if text == OFF:
        return None
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"an address is HOST:PORT or off got={text!r}")
    return Address(host, int(port))


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Settings of one broker process.

    data_dir: everything the broker knows; made when missing, one broker per directory.
    flux, cursus, iggy, kafka07, polywire, any_wire: ``HOST:PORT`` or ``off`` per listener; port 0 lets the system choose.
    tls: ``HOST:PORT`` by wire, where it is spoken under TLS; needs a certificate, with which ``any_wire`` recognises TLS as well.
    tls_certificate, tls_key: PEM files, the certificate with its chain; without a key the certificate's file holds it.
    tls_client_authority: PEM file of who signs the certificates that peers under TLS must then have.
    ready_file: written once all listeners accept, removed when they do no longer.
    durability: least level of any acknowledgement, ``written`` or ``synced``.
    users: file of the users who may log in (``server.users``); without one the broker is open, or keeps the users it was given before.
    insecure: whether it may listen beyond this machine although nobody has to log in.
    partition_count: of topics made automatically.
    drain_timeout_s: how long owed answers may hold up a stop.
    slot_bytes, slot_count_min, slot_count_max, sync_interval_ms: of the journal; without one the log's own default counts.
    retention_hours: how long topics without a setting of their own keep records; 0 for ever.
    retention_mib: how much each partition of such a topic keeps; 0 sets no limit.
    idle_poll_us: how long the loop looks for more bytes before it sleeps, while requests follow each other that quickly (decision 0008).
    flux_admin: whether the FLUX wire's admin commands are known.
    flux_strict_leaders: whether topics made by the FLUX wire begin without leaders.
    cursus_dialect: the one dialect the Cursus wire speaks, ``auto`` recognises it.
    cursus_compression: what every frame to the Cursus wire is compressed with, ``auto`` looks at each.
    cursus_idle_timeout_s: how long a connection of the Cursus wire without a stream may say nothing.
    kafka07_zookeeper: where the Kafka 0.7 wire is registered, ``HOST:PORT/chroot``, or ``off``.
    iggy_dialect: the one dialect the Iggy wire speaks, ``auto`` recognises it.
    """

    data_dir: Path = Path("polywire-data")
    flux: str = "127.0.0.1:9092"
    cursus: str = "127.0.0.1:9000"
    kafka07: str = "127.0.0.1:9093"
    iggy: str = "127.0.0.1:8090"
    polywire: str = "127.0.0.1:9555"
    any_wire: str = OFF
    tls: Mapping[str, str] = field(default_factory=dict)
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_authority: Path | None = None
    ready_file: Path | None = None
    users: Path | None = None
    durability: Level = Level.WRITTEN
    insecure: bool = False
    partition_count: int = DEFAULT_PARTITION_COUNT
    drain_timeout_s: float = 5.0
    slot_bytes: int | None = None
    slot_count_min: int | None = None
    slot_count_max: int | None = None
    sync_interval_ms: int | None = None
    idle_poll_us: int = 100
    retention_hours: float = 0.0
    retention_mib: int = 0
    cursus_dialect: str = AUTO
    cursus_compression: str = AUTO
    cursus_idle_timeout_s: float = CURSUS_IDLE_TIMEOUT_S
    flux_admin: bool = True
    flux_strict_leaders: bool = False
    kafka07_zookeeper: str = OFF
    iggy_dialect: str = AUTO

    def broker_settings(self) -> BrokerSettings:
        """What the broker is built with. Raises Invalid for what it cannot be."""
        return BrokerSettings(
            durability=self.durability,
            partition_count=self.partition_count,
            retention_age_us=int(self.retention_hours * HOUR_US),
            retention_bytes=self.retention_mib * MEBI,
        )

    def log_settings(self) -> LogSettings:
        """Sizes of the journal, where they were given."""
        usual = LogSettings()
        return LogSettings(
            slot_bytes=self.slot_bytes or usual.slot_bytes,
            slot_count_min=self.slot_count_min or usual.slot_count_min,
            slot_count_max=self.slot_count_max or usual.slot_count_max,
            sync_interval_ms=self.sync_interval_ms or usual.sync_interval_ms,
        )

    def listeners(self) -> Mapping[str, Address]:
        """Addresses by listener name, those switched off left out.

        Raises Invalid(INVALID_REQUEST) for a malformed address, for one beyond this machine where nobody has to log in, unless
        ``insecure``, when none is left, for a number out of range, and for a durability below ``written``.
        """
        for name, value, limit in (
            ("idle_poll_us", self.idle_poll_us, IDLE_POLL_US_MAX),
            ("retention_hours", self.retention_hours, RETENTION_HOURS_MAX),
            ("retention_mib", self.retention_mib, RETENTION_MIB_MAX),
        ):
            if not 0 <= value <= limit:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST, f"a setting is out of range name={name} value={value} limit={limit}"
                )
        if self.durability is Level.MEMORY:
            raise Invalid(ErrorCode.INVALID_REQUEST, "durability is written or synced got=memory")
        given = {**{wire: getattr(self, wire) for wire in WIRES}, ANY: self.any_wire}
        given |= {wire + TLS_SUFFIX: text for wire, text in self.tls.items()}
        addresses = {name: address for name, text in given.items() if (address := parse_address(text)) is not None}
        if not addresses:
            raise Invalid(ErrorCode.INVALID_REQUEST, "every listener is off, there is nothing to serve")
        for name, address in addresses.items():
            self._check_reach(name, address)
            if name.endswith(TLS_SUFFIX) and self.tls_certificate is None:
                raise Invalid(ErrorCode.INVALID_REQUEST, f"TLS needs a certificate: --tls-certificate listener={name}")
            self._check_slots(name)
        return addresses

    def _check_slots(self, name: str) -> None:
        """What a wire may be sent must fit one journal file."""
        wires = self.any_wires() or WIRES if name == ANY else (name.removesuffix(TLS_SUFFIX),)
        wire = max(wires, key=STORED_AT_ONCE_BYTES.__getitem__)
        slot_bytes_min = LogSettings.slot_bytes_for(STORED_AT_ONCE_BYTES[wire])
        if self.slot_bytes is not None and self.slot_bytes < slot_bytes_min:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"journal files are too small for what the {wire} wire may be sent at once: --slot-mib"
                f" {-(-slot_bytes_min // MEBI)} or more, or switch the wire off bytes={self.slot_bytes}",
            )

    def _check_reach(self, name: str, address: Address) -> None:
        """Beyond this machine only those who log in, or have a certificate of their own, are served."""
        if (
            self.insecure
            or address.is_loopback
            or (name.endswith(TLS_SUFFIX) and self.tls_client_authority is not None)
        ):
            return
        name = name.removesuffix(TLS_SUFFIX)
        if self.users is None:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "no users are configured, so listening beyond this machine needs --users or --insecure"
                f" listener={name} address={address}",
            )
        if name != ANY and name not in LOGIN_WIRES:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "this wire has no login, so listening beyond this machine needs --insecure"
                f" listener={name} address={address}",
            )

    def any_wires(self) -> frozenset[str] | None:
        """The wires that the listener for all of them recognises; None: every one."""
        address = parse_address(self.any_wire)
        return None if address is None or self.insecure or address.is_loopback else LOGIN_WIRES
