"""``polywire serve``: flags into a ``ServeConfig``, nothing else.

Promises: every setting of the server that users may touch has one flag here, with its environment variable. Must not know: how serving works.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.config import Env

from polywire.cli.usage import examples
from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from polywire.server import lifecycle
from polywire.server.config import CURSUS_IDLE_TIMEOUT_S, WIRES, ServeConfig
from polywire.types import DEFAULT_PARTITION_COUNT, Level

app = App(
    name="serve",
    help_epilogue=examples(
        "polywire serve",
        "polywire serve --data-dir /var/lib/polywire --flux off",
        "polywire serve --any 127.0.0.1:9999 --ready-file polywire.ready",
        "POLYWIRE_SERVE_DURABILITY=synced polywire serve",
    ),
    config=Env("POLYWIRE_", command=True),
)


class Durability(Enum):
    """The least an acknowledged record gets."""

    WRITTEN = "written"
    SYNCED = "synced"


@dataclass(frozen=True, slots=True)
class Listeners:
    """Where the broker listens: HOST:PORT or off per wire; port 0 picks a free port."""

    flux: Annotated[
        str | None,
        Parameter(
            help="HOST:PORT of the FLUX wire, or off. Port 0 picks a free port. When it is not given: 127.0.0.1:9092, and off where users are"
            " configured, because this wire has no login."
        ),
    ] = None
    cursus: Annotated[str, Parameter(help="HOST:PORT of the Cursus wire, or off.")] = "127.0.0.1:9000"
    kafka07: Annotated[
        str | None,
        Parameter(
            help="HOST:PORT of the Kafka 0.7 wire, or off. When it is not given: 127.0.0.1:9093, and off where users are configured, because"
            " this wire has no login."
        ),
    ] = None
    iggy: Annotated[str, Parameter(help="HOST:PORT of the Iggy wire, or off.")] = "127.0.0.1:8090"
    polywire: Annotated[str, Parameter(help="HOST:PORT of the polywire wire, or off.")] = "127.0.0.1:9555"
    any: Annotated[
        str, Parameter(help="HOST:PORT of a port that recognises the wire from its first bytes, or off.")
    ] = "off"
    ready_file: Annotated[
        Path | None,
        Parameter(
            help='Written as JSON, {"flux": {"host": "127.0.0.1", "port": 9092}, ...}, once every listener accepts.'
        ),
    ] = None
    users: Annotated[
        Path | None,
        Parameter(
            help="File of the users who may log in, kept with polywire user. With it, wires that have a login ask for one, and those"
            " without (FLUX, Kafka 0.7) are off unless their address is given: then their peers are the user anonymous."
        ),
    ] = None
    insecure: Annotated[
        bool,
        Parameter(
            negative="",
            help="Allow listening beyond this machine where nobody has to log in, or where passwords travel without TLS.",
        ),
    ] = False
    audit_log: Annotated[
        Path | None,
        Parameter(
            help="File to append logins, refusals and administration to, a line of JSON each; SIGHUP opens it anew."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS 1.2 and newer, on ports of their own."""

    flux_tls: Annotated[str, Parameter(help="HOST:PORT of the FLUX wire under TLS, or off.")] = "off"
    cursus_tls: Annotated[str, Parameter(help="HOST:PORT of the Cursus wire under TLS, or off.")] = "off"
    iggy_tls: Annotated[str, Parameter(help="HOST:PORT of the Iggy wire under TLS, or off.")] = "off"
    kafka07_tls: Annotated[str, Parameter(help="HOST:PORT of the Kafka 0.7 wire under TLS, or off.")] = "off"
    polywire_tls: Annotated[str, Parameter(help="HOST:PORT of the polywire wire under TLS, or off.")] = "off"
    tls_certificate: Annotated[
        Path | None,
        Parameter(
            help="PEM file of the certificate and its chain. With it, the port of all wires recognises TLS, too."
        ),
    ] = None
    tls_key: Annotated[Path | None, Parameter(help="PEM file of its key, when the certificate's does not hold it.")] = (
        None
    )
    tls_client_authority: Annotated[
        Path | None,
        Parameter(
            help="PEM file of an authority: peers under TLS must have a certificate that it has signed. Where users are configured,"
            " its common name must be one of them, and that is who the peer is."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Storage:
    """What is kept, and how safely."""

    data_dir: Annotated[
        Path, Parameter(help="Where everything is kept; made when missing. One broker per directory.")
    ] = Path("polywire-data")
    durability: Annotated[
        Durability,
        Parameter(help="Least level of every acknowledgement; synced also hides unsynced records from readers."),
    ] = Durability.WRITTEN
    partitions: Annotated[int, Parameter(help="Partitions of topics that are made automatically.")] = (
        DEFAULT_PARTITION_COUNT
    )
    retention_hours: Annotated[
        float,
        Parameter(help="Hours that topics without a setting of their own keep records; 0 keeps them for ever."),
    ] = 0.0
    retention_mib: Annotated[int, Parameter(help="MiB that each partition of such a topic keeps; 0 sets no limit.")] = 0
    offsets_retention_hours: Annotated[
        float,
        Parameter(
            help="Hours that positions of groups and consumers stay without members, commits or being asked for; 0 keeps them for ever."
        ),
    ] = 168.0
    state_mib: Annotated[
        int,
        Parameter(
            help="MiB of memory that groups, positions, writers, transactional ids and wires' own state may take, estimated."
        ),
    ] = 256
    owner_share: Annotated[
        float,
        Parameter(
            help="Share of that, and of every limit on how many there are, that one user may have, or one address without a user."
        ),
    ] = 0.5
    scrub_hours: Annotated[
        float, Parameter(help="Every stored segment is read and verified once in so many hours; 0 for never.")
    ] = 168.0
    slot_mib: Annotated[
        int,
        Parameter(
            help="Size of one journal file in MiB. Up to four of them are kept in memory; what fills one is moved to segments."
            " At least 17 for all wires; 11 without polywire, 10 without Iggy as well, 2 for FLUX and Kafka 0.7 alone."
        ),
    ] = 64


@dataclass(frozen=True, slots=True)
class Process:
    """How the process behaves."""

    drain_timeout: Annotated[float, Parameter(help="Seconds that owed answers may hold up a stop.")] = 5.0
    idle_poll_us: Annotated[
        int,
        Parameter(
            help="Microseconds to look for more requests before sleeping, while they follow each other that quickly; 0 saves the power."
        ),
    ] = 100


@dataclass(frozen=True, slots=True)
class Wires:
    """What single wires offer."""

    flux_admin: Annotated[bool, Parameter(help="Serve the FLUX wire's ADMIN_ commands.")] = True
    flux_pipes: Annotated[
        bool, Parameter(help="Take keys and values with pipes on the FLUX wire, as its own broker does.")
    ] = True
    flux_replication_factor: Annotated[
        int,
        Parameter(
            help="Replicas of a topic of the FLUX wire that is given no number of its own, the leader among them."
        ),
    ] = 3
    flux_min_isr: Annotated[
        int, Parameter(help="Replicas in sync, the leader among them, that acks=all of the FLUX wire waits for.")
    ] = 2
    flux_exports: Annotated[
        bool,
        Parameter(
            help="Keep groups.json and offsets.json in the data directory, for programs that look there for the FLUX wire's groups."
        ),
    ] = True
    flux_line_bytes_max: Annotated[
        int, Parameter(help="Longest request of the FLUX wire, its line ending included.")
    ] = LINE_BYTES_MAX
    cursus_dialect: Annotated[
        Literal["auto", "modern", "positional", "legacy"],
        Parameter(help="The only dialect the Cursus wire speaks; auto recognises it frame by frame."),
    ] = "auto"
    cursus_compression: Annotated[
        Literal["auto", "gzip", "lz4", "xerial", "zstd", "snappy"],
        Parameter(
            help="What every frame to the Cursus wire is compressed with. auto looks at each frame, which cannot tell a"
            " raw block of snappy."
        ),
    ] = "auto"
    cursus_idle_timeout: Annotated[
        float, Parameter(help="Seconds that a connection of the Cursus wire without a stream may say nothing.")
    ] = CURSUS_IDLE_TIMEOUT_S
    cursus_dedup_minutes: Annotated[
        float,
        Parameter(
            help="Minutes for which the Cursus wire's legacy dialect drops a payload that its topic has had, 0 for none."
        ),
    ] = 0.0
    kafka07_zookeeper: Annotated[
        str,
        Parameter(
            help="HOST:PORT/chroot of a ZooKeeper where the Kafka 0.7 wire and its topics are registered, or off."
        ),
    ] = "off"
    iggy_dialect: Annotated[
        Literal["auto", "0.0", "0.1.0", "0.1", "0.4", "0.6", "0.7", "0.8", "0.10", "vsr"],
        Parameter(help="Dialect of the Iggy wire by the version that brought it; auto recognises it per connection."),
    ] = "auto"


@app.default
def serve(
    *,
    listeners: Annotated[Listeners, Parameter(name="*", group="Listeners")] = Listeners(),
    tls: Annotated[Tls, Parameter(name="*", group="TLS")] = Tls(),
    storage: Annotated[Storage, Parameter(name="*", group="Storage")] = Storage(),
    process: Annotated[Process, Parameter(name="*", group="Process")] = Process(),
    wires: Annotated[Wires, Parameter(name="*", group="Wires")] = Wires(),
) -> int:
    """Run a broker until SIGTERM or SIGINT."""
    return lifecycle.run(
        ServeConfig(
            data_dir=storage.data_dir,
            flux=listeners.flux,
            cursus=listeners.cursus,
            kafka07=listeners.kafka07,
            iggy=listeners.iggy,
            polywire=listeners.polywire,
            any_wire=listeners.any,
            tls={wire: getattr(tls, f"{wire}_tls") for wire in WIRES},
            tls_certificate=tls.tls_certificate,
            tls_key=tls.tls_key,
            tls_client_authority=tls.tls_client_authority,
            ready_file=listeners.ready_file,
            durability=Level[storage.durability.name],
            partition_count=storage.partitions,
            users=listeners.users,
            insecure=listeners.insecure,
            audit_log=listeners.audit_log,
            drain_timeout_s=process.drain_timeout,
            slot_bytes=storage.slot_mib * 1024 * 1024,
            offsets_retention_hours=storage.offsets_retention_hours,
            state_mib=storage.state_mib,
            owner_share=storage.owner_share,
            idle_poll_us=process.idle_poll_us,
            retention_hours=storage.retention_hours,
            scrub_hours=storage.scrub_hours,
            retention_mib=storage.retention_mib,
            cursus_dialect=wires.cursus_dialect,
            cursus_compression=wires.cursus_compression,
            cursus_idle_timeout_s=wires.cursus_idle_timeout,
            cursus_dedup_minutes=wires.cursus_dedup_minutes,
            flux_admin=wires.flux_admin,
            flux_pipes=wires.flux_pipes,
            flux_replication_factor=wires.flux_replication_factor,
            flux_min_isr=wires.flux_min_isr,
            flux_exports=wires.flux_exports,
            flux_line_bytes_max=wires.flux_line_bytes_max,
            kafka07_zookeeper=wires.kafka07_zookeeper,
            iggy_dialect=wires.iggy_dialect,
        )
    )
