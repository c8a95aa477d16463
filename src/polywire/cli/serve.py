"""``polywire serve``: flags into a ``ServeConfig``, nothing else.

Promises: every setting of the server that users may touch has one flag here, with its environment variable. Must not know: how serving works.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.config import Env

from polywire.cli.usage import examples
from polywire.server import lifecycle
from polywire.server.config import ServeConfig
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


@app.default
def serve(
    *,
    data_dir: Path = Path("polywire-data"),
    flux: str = "127.0.0.1:9092",
    polywire: str = "127.0.0.1:9555",
    any: Annotated[str, Parameter(name="--any")] = "off",
    ready_file: Path | None = None,
    durability: Durability = Durability.WRITTEN,
    partitions: int = DEFAULT_PARTITION_COUNT,
    insecure: Annotated[bool, Parameter(negative="")] = False,
    drain_timeout: float = 5.0,
    slot_mib: int = 64,
    idle_poll_us: int = 100,
    flux_admin: bool = True,
) -> int:
    """Run a broker until SIGTERM or SIGINT.

    Parameters
    ----------
    data_dir
        Where everything is kept; made when missing. One broker per directory.
    flux
        HOST:PORT of the FLUX wire, or off. Port 0 picks a free port.
    polywire
        HOST:PORT of the polywire wire, or off.
    any
        HOST:PORT of a port that recognises the wire from its first bytes, or off.
    ready_file
        Written as JSON, {"flux": {"host": "127.0.0.1", "port": 9092}, ...}, once every listener accepts.
    durability
        Least level of every acknowledgement; synced also hides unsynced records from readers.
    partitions
        Partitions of topics that are made automatically.
    insecure
        Allow listening beyond this machine although no users are configured.
    drain_timeout
        Seconds that owed answers may hold up a stop.
    slot_mib
        Size of one journal file in MiB. Up to four of them are kept in memory; what fills one is moved to segments.
    idle_poll_us
        Microseconds to look for more requests before sleeping, while they follow each other that quickly; 0 saves the power.
    flux_admin
        Serve the FLUX wire's ADMIN_ commands.
    """
    return lifecycle.run(
        ServeConfig(
            data_dir=data_dir,
            flux=flux,
            polywire=polywire,
            any_wire=any,
            ready_file=ready_file,
            durability=Level[durability.name],
            partition_count=partitions,
            insecure=insecure,
            drain_timeout_s=drain_timeout,
            slot_bytes=slot_mib * 1024 * 1024,
            idle_poll_us=idle_poll_us,
            flux_admin=flux_admin,
        )
    )
