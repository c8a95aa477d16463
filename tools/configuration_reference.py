"""The reference page of settings: every option of ``polywire serve``, by topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from polywire.server.config import RELOADED
from tools.markdown import MADE, table

Row = tuple[str, str, str, str]
"""An option: names, default, environment variable, meaning."""

TOPICS: Final[Mapping[str, Sequence[str]]] = {
    "Listeners": (
        "polywire", "kafka", "kafka07", "flux", "cursus", "iggy", "any", "http", "http-names", "ready-file",
    ),
    "TLS": (
        "polywire-tls", "kafka-tls", "kafka07-tls", "flux-tls", "cursus-tls", "iggy-tls", "http-tls", "tls-certificate", "tls-key",
        "tls-client-authority", "tls-machine-authority",
    ),
    "Users and audit": (
        "users", "quotas", "insecure", "audit-log", "oidc-issuer", "oidc-audience", "oidc-keys", "oidc-user-claim",
    ),
    "Storage": ("data-dir", "durability", "memory-mib", "slot-mib", "cache-mib", "scrub-hours"),
    "Topics and retention": ("partitions", "retention-hours", "retention-mib", "offsets-retention-hours"),
    "Tables": ("table", "table-freshness-s", "table-history-hours", "tables-url"),
    "Limits": ("state-mib", "owner-share"),
    "Bucket": ("bucket", "node", "advertise", "cache-gib", "delete-grace-s", "balance-s", "node-timeout-s", "bucket-prices"),
    "Processes": ("processes", "shard-port"),
    "The process": ("config", "detach", "log-format", "drain-timeout", "idle-poll-us", "driver"),
    "Kafka": ("kafka-advertise", "kafka-acks-all", "kafka-replication-factor-max"),
    "Kafka 0.7": ("kafka07-zookeeper",),
    "FLUX": (
        "flux-admin", "flux-pipes", "flux-replication-factor", "flux-min-isr", "flux-exports", "flux-line-bytes-max",
    ),
    "Cursus": ("cursus-dialect", "cursus-compression", "cursus-idle-timeout", "cursus-dedup-minutes"),
    "Iggy": ("iggy-dialect",),
}  # fmt: skip
GUIDES: Final[Mapping[str, str]] = {
    "Listeners": "[deploy a broker](../operate/deploy.md)",
    "TLS": "[secure a broker](../operate/secure.md#encrypt-with-tls), [TLS between machines](../operate/cluster.md#tls-between-machines)",
    "Users and audit": "[secure a broker](../operate/secure.md)",
    "Storage": "[durability](../concepts/durability.md), [size a broker](../operate/size.md)",
    "Topics and retention": "[settings of a topic](limits.md#a-topic), which override retention",
    "Tables": "[topics as tables](../concepts/tables.md)",
    "Limits": "[limits](limits.md)",
    "Bucket": "[operate a cluster](../operate/cluster.md)",
    "Processes": "[choose a topology](../operate/topology.md)",
}


def configuration_page(options: Callable[[], Iterator[Row]]) -> Iterator[str]:
    """Yield every setting by topic. Raises ValueError if the topics and the options of ``polywire serve`` differ."""
    rows = {row[0].partition(",")[0].strip("`").removeprefix("--"): row for row in options()}
    named = [name for names in TOPICS.values() for name in names]
    if set(named) != set(rows):
        raise ValueError(f"tools/configuration_reference.py and polywire serve differ: {set(named) ^ set(rows)}")
    yield from ["# Configuration", "", MADE, ""]
    yield "Settings of `polywire serve`. Each can be given in three places: an option overrides the environment, the environment"
    yield "overrides the file."
    yield ""
    places = [
        ("option", "`--data-dir /var/lib/polywire`"),
        ("environment", "`POLYWIRE_SERVE_DATA_DIR=/var/lib/polywire`"),
        ("file", '`data-dir = "/var/lib/polywire"` in the table `[serve]`'),
    ]
    yield from table(("place", "example"), places)
    yield from [
        "",
        '```toml title="polywire.toml"',
        "[serve]",
        'data-dir = "/var/lib/polywire"',
        'durability = "synced"',
        'flux = "off"',
        "retention-hours = 72",
        "flux-admin = false",
        "```",
        "",
        "* The broker reads `polywire.toml` in the current directory if it exists. `--config FILE` names another file, which must exist.",
        "* Keys are option names with `-` or `_`. A switch is `true` or `false`. Paths are relative to the current directory.",
        "* An unknown key prevents the start, and the error suggests the closest name. Unknown variables that begin with",
        "  `POLYWIRE_SERVE_` do not; `polywire config check` reports them.",
        "* Settings are read at the start only. [SIGHUP](#reload-without-a-restart) reloads some.",
        "",
        "## Reload without a restart",
        "",
        "SIGHUP (`kill -HUP PID`, or `systemctl reload`) applies changed files. Connections stay open, unless their login ends. If a file",
        "cannot be read, the broker logs the error and continues with the previous content. `polywire config show --reloaded` lists",
        "the files of a broker. Quotas, users of the broker and topic settings change at run time without a reload.",
        "",
    ]
    yield from table(("setting, or its file", "SIGHUP"), [(f"`--{name}`", effect) for name, effect in RELOADED.items()])
    for title, names in TOPICS.items():
        yield from ["", f"## {title}", ""]
        if title in GUIDES:
            yield from [f"See {GUIDES[title]}.", ""]
        shown = [(rows[name][0], rows[name][1], rows[name][3]) for name in names]
        yield from table(("option", "default", "meaning"), shown)
