"""``polywire serve``: its options, and the ``ServeConfig`` built from them.

The keys in the table ``serve`` of ``polywire.toml`` are the names of the options; an unknown key is an error. Options override
environment variables, and these override the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Env
from cyclopts.validators import Number

from polywire.broker.settings import TableFormat, TableFormats
from polywire.choices import did_you_mean
from polywire.cli import plain_logging  # noqa: F401 - before modules that import structlog
from polywire.cli.usage import DATA_DIR, SERVE, SETTINGS_FILE, examples, read_settings
from polywire.errors import ErrorCode, Invalid
from polywire.protocols.flux.decoder import LINE_BYTES_MAX
from polywire.server import lifecycle, startup
from polywire.server.config import CACHE_MIB, CURSUS_IDLE_TIMEOUT_S, HTTP, WIRES, ServeConfig
from polywire.types import DEFAULT_PARTITION_COUNT, Level

FILE_OPTION: Final = "--config"
VARIABLES: Final = "POLYWIRE_SERVE_"  # prefix of the environment variables


class SettingsFile:
    """Sets arguments from the settings file (a configuration source of cyclopts)."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Set every argument that has no value yet from the file.

        Raises CycloptsError for an unknown key, and OSError for an unreadable file.
        """
        tokens = next(argument for argument in arguments if argument.name == FILE_OPTION).tokens
        path = Path(tokens[0].value) if tokens else SETTINGS_FILE
        source = read_settings(path, must_exist=bool(tokens))
        options = {argument.name.removeprefix("--") for argument in arguments if not argument.children}
        check_keys(source.config, options - {FILE_OPTION.removeprefix("--")}, path)
        source(app, commands, arguments)


def check_keys(content: Mapping[str, Any], options: Collection[str], path: Path) -> None:
    """Raise CycloptsError for a key that is not the name of an option."""
    for table in content:
        if table != SERVE:
            raise CycloptsError(msg=f"{path}: unknown key {table!r}{_suggestion(table, {SERVE}, options)}")
    settings = content.get(SERVE, {})
    if not isinstance(settings, Mapping):
        raise CycloptsError(msg=f"{path}: [{SERVE}] must be a table")
    seen: set[str] = set()
    for key in settings:
        name = key.replace("_", "-")
        if name not in options:
            raise CycloptsError(msg=f"{path}: unknown key {key!r} in [{SERVE}]{_suggestion(name, options)}")
        if name in seen:
            raise CycloptsError(msg=f"{path}: duplicate key {name!r} in [{SERVE}]")
        seen.add(name)


def check_variables(names: Collection[str], options: Collection[str]) -> None:
    """Raise CycloptsError for an environment variable that has the prefix of settings but names no option."""
    known = {f"{VARIABLES}{option.replace('-', '_').upper()}" for option in options}
    for name in sorted(names):
        if name.startswith(VARIABLES) and name not in known:
            raise CycloptsError(msg=f"unknown environment variable {name!r}{_suggestion(name, known)}")


def _suggestion(key: str, known: Collection[str], below: Collection[str] = ()) -> str:
    """Return the end of a message about an unknown key, which suggests a similar key; empty if there is none."""
    if key.replace("_", "-") in below:
        return f" (move it below [{SERVE}])"
    return did_you_mean(key, sorted(known))


SOURCES: Final = (Env(VARIABLES, command=False), SettingsFile())
"""Sources of settings that are not on the command line. The first that has a value is used."""

app = App(
    name="serve",
    help_epilogue=examples(
        "polywire serve",
        "polywire serve --detach",
        "polywire serve --data-dir /var/lib/polywire --flux off",
        "polywire serve --any 127.0.0.1:9999 --ready-file polywire.ready",
        "POLYWIRE_SERVE_DURABILITY=synced polywire serve",
        "polywire serve --config staging.toml",
        exits={lifecycle.EXIT_STORAGE: "storage failed; later requests were not acknowledged"},
    ),
    config=SOURCES,
)


class Durability(Enum):
    """Durability level at which a record is acknowledged."""

    WRITTEN = "written"
    SYNCED = "synced"


@dataclass(frozen=True, slots=True)
class Listeners:
    """Addresses of the listeners, and access to them."""

    flux: Annotated[
        str | None,
        Parameter(
            help="Address of the FLUX listener as HOST:PORT, or off. Port 0 picks a free port. Defaults to 127.0.0.1:9092, "
            "or to off if --users is set, because FLUX has no login."
        ),
    ] = None
    cursus: Annotated[str, Parameter(help="Address of the Cursus listener as HOST:PORT, or off.")] = "127.0.0.1:9000"
    kafka: Annotated[str, Parameter(help="Address of the Kafka listener as HOST:PORT, or off.")] = "127.0.0.1:9094"
    kafka07: Annotated[
        str | None,
        Parameter(
            help="Address of the Kafka 0.7 listener as HOST:PORT, or off. Defaults to 127.0.0.1:9093, or to off if --users "
            "is set, because Kafka 0.7 has no login."
        ),
    ] = None
    iggy: Annotated[str, Parameter(help="Address of the Iggy listener as HOST:PORT, or off.")] = "127.0.0.1:8090"
    polywire: Annotated[str, Parameter(help="Address of the polywire listener as HOST:PORT, or off.")] = (
        "127.0.0.1:9555"
    )
    any: Annotated[
        str,
        Parameter(
            help="Address, as HOST:PORT, of a listener that accepts every protocol and detects it from the first bytes, or off."
        ),
    ] = "off"
    http: Annotated[
        str | None,
        Parameter(
            help="Address of the HTTP listener (health, metrics, admin API, console) as HOST:PORT, or off. Defaults to "
            "127.0.0.1:9080, or to off if that port is in use."
        ),
    ] = None
    http_names: Annotated[
        str,
        Parameter(
            help="Comma-separated host names that the HTTP listener accepts when no users are configured, in addition to "
            "localhost and IP addresses."
        ),
    ] = ""
    ready_file: Annotated[
        Path | None,
        Parameter(
            help='File to create once all listeners accept connections. It holds their addresses as JSON: {"flux": {"host": '
            '"127.0.0.1", "port": 9092}, ...}.'
        ),
    ] = None
    users: Annotated[
        Path | None,
        Parameter(
            help="Users file, managed with polywire user. If set, clients must log in. FLUX and Kafka 0.7 have no login: they "
            "are then off unless their address is set, and their clients act as the user anonymous."
        ),
    ] = None
    insecure: Annotated[
        bool,
        Parameter(
            negative="",
            help="Allow non-loopback addresses without authentication, or with passwords sent in clear text.",
        ),
    ] = False
    quotas: Annotated[
        str | None,
        Parameter(
            help="Quotas in bytes or requests per second, separated by semicolons: user=alice produce=1MB fetch=5MB; client-id=* "
            "requests=100. The name * stands for all without a quota of their own. polywire quota changes them at run time."
        ),
    ] = None
    oidc_issuer: Annotated[
        str | None,
        Parameter(
            help="Issuer of tokens of OpenID Connect that clients can log in with, as in the claim iss. Needs --users and "
            "pip install 'polywire[oidc]'."
        ),
    ] = None
    oidc_audience: Annotated[str | None, Parameter(help="Audience of the tokens, as in the claim aud.")] = None
    oidc_keys: Annotated[
        str | None,
        Parameter(help="File or https URL of the JSON Web Key Set with the public keys of the issuer."),
    ] = None
    oidc_user_claim: Annotated[str, Parameter(help="Claim of the tokens with the name of the user.")] = "sub"
    audit_log: Annotated[
        Path | None,
        Parameter(
            help="File to append audit events to as JSON lines: logins, denials and administrative changes. SIGHUP reopens "
            "it."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Tls:
    """Listeners with TLS 1.2 or newer, and their certificates."""

    flux_tls: Annotated[str, Parameter(help="Address of the FLUX listener with TLS as HOST:PORT, or off.")] = "off"
    cursus_tls: Annotated[str, Parameter(help="Address of the Cursus listener with TLS as HOST:PORT, or off.")] = "off"
    iggy_tls: Annotated[str, Parameter(help="Address of the Iggy listener with TLS as HOST:PORT, or off.")] = "off"
    kafka_tls: Annotated[str, Parameter(help="Address of the Kafka listener with TLS as HOST:PORT, or off.")] = "off"
    kafka07_tls: Annotated[str, Parameter(help="Address of the Kafka 0.7 listener with TLS as HOST:PORT, or off.")] = (
        "off"
    )
    polywire_tls: Annotated[str, Parameter(help="Address of the polywire listener with TLS as HOST:PORT, or off.")] = (
        "off"
    )
    http_tls: Annotated[str, Parameter(help="Address of the HTTP listener with TLS as HOST:PORT, or off.")] = "off"
    tls_certificate: Annotated[
        Path | None,
        Parameter(help="PEM file with the certificate chain. If set, the --any listener accepts TLS as well."),
    ] = None
    tls_key: Annotated[
        Path | None, Parameter(help="PEM file with the private key, unless the certificate file contains it.")
    ] = None
    tls_client_authority: Annotated[
        Path | None,
        Parameter(
            help="PEM file with a CA certificate. If set, TLS clients must present a certificate signed by it. With "
            "--users, the common name of the client's certificate is the user name."
        ),
    ] = None
    tls_machine_authority: Annotated[
        Path | None,
        Parameter(
            help="PEM file with the CA certificate of the machines that share a bucket with several shards. If set, "
            "these machines connect to each other with mutual TLS, using --tls-certificate."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Storage:
    """Where records are stored, how durably, and for how long."""

    data_dir: Annotated[
        Path, Parameter(help="Data directory, created if missing. Only one broker can use it at a time.")
    ] = DATA_DIR
    bucket: Annotated[
        str | None,
        Parameter(
            help="Store the log in a bucket: s3://, gs://, az:// or file:///, with a prefix. Records are acknowledged once they "
            "are in the bucket; the data directory is only a cache. One broker is the leader; the others are standbys that "
            "forward connections to it and take over when it fails."
        ),
    ] = None
    node: Annotated[
        str | None,
        Parameter(help="Name of this broker among the brokers of the bucket. Defaults to the host name."),
    ] = None
    advertise: Annotated[
        str | None,
        Parameter(
            help="Host at which other brokers of the bucket reach this one. Defaults to the host of its listeners, or to the "
            "host name if they listen on all interfaces."
        ),
    ] = None
    cache_gib: Annotated[
        float,
        Parameter(
            help="With --bucket: size in GiB of the cache in the data directory, which holds segments of the bucket."
        ),
    ] = 20.0
    memory_mib: Annotated[
        int,
        Parameter(
            help="Memory in MiB that the broker may use, at least 256 for each process. Caches, journal files, state "
            "and buffers become smaller to fit. 0 means all memory of the machine or container."
        ),
    ] = 0
    cache_mib: Annotated[
        int,
        Parameter(
            help="Memory in MiB for the records most recently moved to segments, at most a quarter of the memory. "
            "Consumers that lag slightly read them without the disk. 0 disables this cache."
        ),
    ] = CACHE_MIB
    delete_grace_s: Annotated[
        float,
        Parameter(help="Seconds to keep deleted segments in the bucket, so that running queries can finish."),
    ] = 900.0
    node_timeout_s: Annotated[
        float,
        Parameter(
            help="With --bucket: seconds without a heartbeat, from 1 to 60, after which a standby takes over from this "
            "broker. The broker writes four heartbeats in this time. Each heartbeat is a request to the bucket."
        ),
    ] = 8.0
    balance_s: Annotated[
        float,
        Parameter(
            help="Seconds a preferred standby must be healthy before it takes over its shard. This spreads leadership "
            "evenly over the machines and moves at most one shard every ten minutes. 0 disables it."
        ),
    ] = 30.0
    bucket_prices: Annotated[
        str | None,
        Parameter(
            help="Price of 1,000 requests to the bucket by kind (put, get, list, delete), in any currency: "
            "put=0.005,list=0.005,get=0.0004. Metrics, the console and polywire top then show what requests cost."
        ),
    ] = None
    durability: Annotated[
        Durability,
        Parameter(
            help="When a record is acknowledged at the earliest: once written to the operating system, or once synced to "
            "disk. With synced, consumers see only synced records."
        ),
    ] = Durability.WRITTEN
    partitions: Annotated[int, Parameter(help="Number of partitions of topics that are created automatically.")] = (
        DEFAULT_PARTITION_COUNT
    )
    retention_hours: Annotated[
        float,
        Parameter(help="Default retention time of topics in hours; 0 means forever."),
    ] = 0.0
    retention_mib: Annotated[
        int, Parameter(help="Default retention size of each partition in MiB; 0 means no limit.")
    ] = 0
    table: Annotated[
        TableFormats,
        Parameter(help="Formats of the table that the broker writes for each topic without its own setting."),
    ] = "none"
    table_freshness_s: Annotated[
        int,
        Parameter(
            validator=Number(gte=1, lte=86_400),
            help="Maximum seconds until a record is in its topic's table, for topics without their own setting.",
        ),
    ] = 60
    table_history_hours: Annotated[
        int,
        Parameter(
            validator=Number(gte=0, lte=8_760),
            help="Hours for which older versions of a table can be read, for topics without their own setting.",
        ),
    ] = 168
    tables_url: Annotated[
        str | None,
        Parameter(
            help="Where to write tables: file:///path, s3://bucket/prefix, gs:// or az://. Defaults to the directory tables "
            "in the bucket or the data directory."
        ),
    ] = None
    offsets_retention_hours: Annotated[
        float,
        Parameter(
            help="Hours after which unused committed offsets expire: no active members, no commits, no fetches. 0 means never."
        ),
    ] = 168.0
    state_mib: Annotated[
        int,
        Parameter(
            help="Memory limit in MiB (estimated) for groups, committed offsets, writers, transactional ids and protocol "
            "state, at most an eighth of the memory."
        ),
    ] = 256
    owner_share: Annotated[
        float,
        Parameter(
            help="Share of --state-mib that one user, or one client address without a login, can use. The same share "
            "applies to each limit on the number of groups, writers and similar objects."
        ),
    ] = 0.5
    scrub_hours: Annotated[
        float,
        Parameter(
            help="Interval in hours for reading all stored segments and verifying their checksums; 0 disables scrubbing."
        ),
    ] = 168.0
    slot_mib: Annotated[
        int,
        Parameter(
            help="Size of a journal file in MiB, at most a sixteenth of the memory or 17, if that is larger. Up to four "
            "are kept in memory; a full one is moved to segments. The minimum depends on the enabled protocols: 17 with "
            "polywire or Kafka, 11 with Iggy, 10 with Cursus, otherwise 2."
        ),
    ] = 64


@dataclass(frozen=True, slots=True)
class Process:
    """Processes, settings file, logging and I/O."""

    config: Annotated[
        Path | None,
        Parameter(
            help="TOML settings file with a table [serve] whose keys are the names of these options. Defaults to polywire.toml "
            "if that file exists."
        ),
    ] = None
    processes: Annotated[
        int | None,
        Parameter(
            help="Number of processes that share the data directory and the listeners, each owning part of the topics (Linux). "
            "For a data directory the default is 1, and the number can never be lowered. With --bucket, the first start "
            "creates a shard for each process, and later starts use a process for each shard."
        ),
    ] = None
    shard_port: Annotated[
        int,
        Parameter(
            help="First port of the listeners that each process has for itself; 20 ports are reserved for each process. Kafka "
            "clients, other machines of the bucket and, without a bucket, Cursus clients connect to them. With 0, the system "
            "chooses the ports if there is a bucket; otherwise process N listens N x 100 above the shared port."
        ),
    ] = 0
    detach: Annotated[
        bool,
        Parameter(
            negative="",
            help="Run the broker in the background and return once it accepts connections. It logs to a file next to the data "
            "directory; stop it with polywire stop.",
        ),
    ] = False
    log_format: Annotated[Literal["logfmt", "json"], Parameter(help="Format of log lines on standard error.")] = (
        "logfmt"
    )
    drain_timeout: Annotated[float, Parameter(help="Seconds to wait for pending responses at shutdown.")] = 5.0
    idle_poll_us: Annotated[
        int,
        Parameter(
            help="Microseconds to poll for more requests before sleeping while the broker is busy; 0 disables polling and "
            "saves power."
        ),
    ] = 100
    driver: Annotated[
        Literal["auto", "epoll", "loop"],
        Parameter(
            help="I/O driver for plain connections: epoll, or the event loop, which always serves TLS and HTTP. auto uses epoll "
            "where it is available."
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class Wires:
    """Settings of single protocols."""

    flux_admin: Annotated[bool, Parameter(help="Enable the ADMIN_ commands of FLUX.")] = True
    flux_pipes: Annotated[
        bool, Parameter(help="Accept FLUX keys and values that contain |, as the original broker does.")
    ] = True
    flux_replication_factor: Annotated[
        int,
        Parameter(help="Default replication factor of FLUX topics, including the leader."),
    ] = 3
    flux_min_isr: Annotated[
        int,
        Parameter(help="Number of in-sync replicas, including the leader, that acks=all waits for in FLUX."),
    ] = 2
    flux_exports: Annotated[
        bool,
        Parameter(
            help="Write groups.json and offsets.json to the data directory, for tools that read FLUX groups from there."
        ),
    ] = True
    flux_line_bytes_max: Annotated[
        int, Parameter(help="Maximum length of a FLUX request in bytes, including the line ending.")
    ] = LINE_BYTES_MAX
    cursus_dialect: Annotated[
        Literal["auto", "modern", "positional", "legacy"],
        Parameter(help="Dialect of Cursus; auto detects it for each frame."),
    ] = "auto"
    cursus_compression: Annotated[
        Literal["auto", "gzip", "lz4", "xerial", "zstd", "snappy"],
        Parameter(
            help="Compression of the frames that Cursus clients send. auto detects it for each frame, except for raw snappy "
            "blocks."
        ),
    ] = "auto"
    cursus_idle_timeout: Annotated[
        float, Parameter(help="Seconds after which an idle Cursus connection is closed, unless it has an open stream.")
    ] = CURSUS_IDLE_TIMEOUT_S
    cursus_dedup_minutes: Annotated[
        float,
        Parameter(
            help="Minutes during which the legacy dialect of Cursus drops duplicate payloads of a topic; 0 disables "
            "deduplication."
        ),
    ] = 0.0
    kafka_advertise: Annotated[
        str,
        Parameter(
            help="Address, as HOST:PORT, that Kafka clients are given to connect to; auto returns the address each client used. "
            "With several processes only the host applies: each process has its own port (--shard-port)."
        ),
    ] = "auto"
    kafka_acks_all: Annotated[
        Durability,
        Parameter(
            help="What acks=all of Kafka clients waits for: synced to disk, or written to the operating system, as Apache Kafka "
            "does."
        ),
    ] = Durability.SYNCED
    kafka_replication_factor_max: Annotated[
        int,
        Parameter(
            help="Highest replication factor that Kafka clients can request for a new topic, for applications that always "
            "request 3. The topic gets one replica, and the response says so."
        ),
    ] = 1
    kafka07_zookeeper: Annotated[
        str,
        Parameter(
            help="ZooKeeper address, as HOST:PORT/chroot, in which to register the Kafka 0.7 listener and its topics, or off."
        ),
    ] = "off"
    iggy_dialect: Annotated[
        Literal["auto", "0.0", "0.1.0", "0.1", "0.4", "0.6", "0.7", "0.8", "0.10", "vsr", "vsr-0.12", "vsr-0.12.2"],
        Parameter(
            help="Dialect of Iggy, named by the version that introduced it; auto detects it for each connection."
        ),
    ] = "auto"


@app.default
def serve(
    *,
    listeners: Annotated[Listeners, Parameter(name="*", group="Listeners")] = Listeners(),
    tls: Annotated[Tls, Parameter(name="*", group="TLS")] = Tls(),
    storage: Annotated[Storage, Parameter(name="*", group="Storage")] = Storage(),
    process: Annotated[Process, Parameter(name="*", group="Process")] = Process(),
    wires: Annotated[Wires, Parameter(name="*", group="Protocols")] = Wires(),
) -> int:
    """Run a broker until SIGTERM or SIGINT."""
    config = config_of(listeners=listeners, tls=tls, storage=storage, process=process, wires=wires)
    if process.detach:
        from polywire.cli.detached import serve_detached

        return serve_detached(config, _run)
    return _run(config)


def _run(config: ServeConfig) -> int:
    if not config.bucket and config.processes in (0, 1):
        return startup.run(config)
    from polywire.server.processes import run_processes

    return run_processes(config)


def config_of(*, listeners: Listeners, tls: Tls, storage: Storage, process: Process, wires: Wires) -> ServeConfig:
    unsecured = ServeConfig(
        data_dir=storage.data_dir,
        flux=listeners.flux,
        cursus=listeners.cursus,
        kafka=listeners.kafka,
        kafka07=listeners.kafka07,
        iggy=listeners.iggy,
        polywire=listeners.polywire,
        any_wire=listeners.any,
        http=listeners.http,
        http_names=listeners.http_names,
        ready_file=listeners.ready_file,
        durability=Level[storage.durability.name],
        bucket=storage.bucket or "",
        node=storage.node or "",
        advertise=(storage.advertise or "").removeprefix("[").removesuffix("]"),
        cache_gib=storage.cache_gib,
        memory_mib=storage.memory_mib,
        cache_mib=storage.cache_mib,
        delete_grace_s=storage.delete_grace_s,
        bucket_prices=storage.bucket_prices or "",
        partition_count=storage.partitions,
        drain_timeout_s=process.drain_timeout,
        processes=process.processes or 0,
        shard_port=process.shard_port,
        balance_s=storage.balance_s,
        node_timeout_s=storage.node_timeout_s,
        slot_bytes=storage.slot_mib * 1024 * 1024,
        offsets_retention_hours=storage.offsets_retention_hours,
        state_mib=storage.state_mib,
        owner_share=storage.owner_share,
        idle_poll_us=process.idle_poll_us,
        driver=process.driver,
        retention_hours=storage.retention_hours,
        scrub_hours=storage.scrub_hours,
        retention_mib=storage.retention_mib,
        table=TableFormat(storage.table),
        table_freshness_s=storage.table_freshness_s,
        table_history_hours=storage.table_history_hours,
        tables_url=storage.tables_url or "",
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
        kafka_advertise=wires.kafka_advertise,
        kafka_acks_all=Level[wires.kafka_acks_all.name],
        kafka_replication_factor_max=wires.kafka_replication_factor_max,
        kafka07_zookeeper=wires.kafka07_zookeeper,
        iggy_dialect=wires.iggy_dialect,
        log_format=process.log_format,
    )
    return _secured(unsecured, listeners, tls, process.config or SETTINGS_FILE)


def _quotas_reader(path: Path, quotas: str | None) -> Callable[[], str] | None:
    """Return a function that reads the quotas of the settings file; None if an option or a variable overrides them."""
    path = path.absolute()
    was_missing = not path.exists()

    def read() -> str:
        return "" if was_missing and not path.exists() else _quotas_of_file(path)

    try:
        is_overridden = (quotas or "") != read()
    except (OSError, Invalid):
        is_overridden = bool(quotas)
    return None if is_overridden else read


def _quotas_of_file(path: Path) -> str:
    """Return the quotas of a settings file; empty if there are none. Raises Invalid(INVALID_REQUEST), and OSError."""
    try:
        settings = tomllib.loads(path.read_text("utf-8")).get(SERVE, {})
    except ValueError as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{path} is not valid TOML: {error}") from error
    quotas = settings.get("quotas", "") if isinstance(settings, dict) else None
    if not isinstance(quotas, str):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{path}: quotas in [{SERVE}] must be a text")
    return quotas


def _secured(config: ServeConfig, listeners: Listeners, tls: Tls, settings_file: Path) -> ServeConfig:
    return replace(
        config,
        users=listeners.users,
        quotas=listeners.quotas or "",
        reread_quotas=_quotas_reader(settings_file, listeners.quotas),
        oidc_issuer=listeners.oidc_issuer or "",
        oidc_audience=listeners.oidc_audience or "",
        oidc_keys=listeners.oidc_keys or "",
        oidc_user_claim=listeners.oidc_user_claim,
        insecure=listeners.insecure,
        audit_log=listeners.audit_log,
        tls={wire: getattr(tls, f"{wire}_tls") for wire in WIRES} | {HTTP: tls.http_tls},
        tls_certificate=tls.tls_certificate,
        tls_key=tls.tls_key,
        tls_client_authority=tls.tls_client_authority,
        tls_machine_authority=tls.tls_machine_authority,
    )
