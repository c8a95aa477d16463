"""``polywire dev``: a local broker with all protocols and a sample topic that receives records.

Without ``--data-dir`` the data is deleted at the end. The listeners have the addresses of ``polywire serve``, including
those from the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.cli.connection import ADDRESS_DEFAULT
from polywire.cli.output import note
from polywire.cli.serve import VARIABLES
from polywire.cli.usage import examples
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.errors import BrokerError, Conflict
from polywire.records.columns import Record
from polywire.server import lifecycle, startup
from polywire.server.config import HTTP, WIRES, ServeConfig
from polywire.types import spell_address

SAMPLE: Final = "sample"
SAMPLE_PARTITIONS: Final = 3
SAMPLE_RECORDS: Final = 100
SLOT_BYTES: Final = 17 * 1024 * 1024  # the smallest size that fits the largest request of every protocol
READY_POLL_S: Final = 0.02
FREE_PORT: Final = "127.0.0.1:0"

app = App(
    name="dev",
    help_epilogue=examples(
        "polywire dev",
        "polywire dev --free-ports --data-dir dev-data",
        "polywire record tail sample",
        exits={lifecycle.EXIT_STORAGE: "storage failed"},
    ),
)


@app.default
def dev(
    *,
    data_dir: Annotated[
        Path | None, Parameter(help="Data directory. Defaults to a temporary directory that is deleted at the end.")
    ] = None,
    free_ports: Annotated[
        bool, Parameter(negative="", help="Listen on free ports instead of the default ports.")
    ] = False,
    rate: Annotated[
        float,
        Parameter(help="Records per second to produce to the topic sample.", validator=Number(gte=0, lte=1000)),
    ] = 2.0,
) -> int:
    """Run a local broker for development until SIGTERM or SIGINT, with all protocols and a sample topic."""
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(TemporaryDirectory(prefix="polywire-dev-")))
        ready = temporary / "ready.json"
        config = ServeConfig(data_dir=data_dir or temporary / "data", ready_file=ready, slot_bytes=SLOT_BYTES)
        config = replace(config, **_addresses(FREE_PORT if free_ports else None))
        stopping = threading.Event()
        sampler = threading.Thread(target=_sample, args=(ready, rate, stopping), name="polywire-sample", daemon=True)
        sampler.start()
        try:
            code = startup.run(config)
        finally:
            stopping.set()
            sampler.join()
        if code == lifecycle.EXIT_START and not free_ports:
            note("if the ports are in use, run: polywire dev --free-ports")
        return code


def _addresses(everywhere: str | None) -> dict[str, Any]:
    """Return the addresses that are not the defaults, by listener."""
    found = {name: everywhere or os.environ.get(f"{VARIABLES}{name.upper()}") for name in (*WIRES, HTTP)}
    return {name: address for name, address in found.items() if address is not None}


def _sample(ready: Path, rate: float, stopping: threading.Event) -> None:
    """Wait for the broker, create the sample topic, print the addresses, and produce records at this rate."""
    while not ready.exists():
        if stopping.wait(READY_POLL_S):
            return
    listeners = json.loads(ready.read_text(encoding="utf-8"))
    url = _url("polywire", listeners["polywire"])
    try:
        asyncio.run(_produce_samples(url, listeners, rate, stopping))
    except BrokerError as error:
        if not stopping.is_set():
            note(f"stopped producing sample records: {error.message}")


def _url(wire: str, listener: dict[str, Any]) -> str:
    return f"{wire}://{spell_address(listener['host'], listener['port'])}"


async def _produce_samples(
    url: str, listeners: dict[str, dict[str, Any]], rate: float, stopping: threading.Event
) -> None:
    client = await connect(url)
    try:
        number = await _create_sample_topic(client)
        urls = {name: _url(name, listener) for name, listener in listeners.items()}
        print(introduction_of(urls) if sys.stdout.isatty() else json.dumps(urls), flush=True)
        address = "" if url == ADDRESS_DEFAULT else f" --address {url}"
        note(f"ready topic={SAMPLE} records={number}; try: polywire record tail {SAMPLE}{address}")
        while not await asyncio.to_thread(stopping.wait, 1 / rate if rate else None):
            await client.produce(SAMPLE, [_record(number)])
            number += 1
    finally:
        await client.close()


def introduction_of(urls: dict[str, str]) -> str:
    """Return what a newcomer reads: where the listeners are, and what to try."""
    lines = [f"  {name:9} {urls[name]}" for name in (*sorted(urls.keys() - {HTTP}), HTTP)]
    return "\n".join(
        ["", "Every protocol reads and writes the same topics. The console is at the last address.", *lines, ""]
    )


async def _create_sample_topic(client: WireClient) -> int:
    """Create the topic with its first records, unless it exists already; return its number of records."""
    try:
        await client.create_topic(SAMPLE, SAMPLE_PARTITIONS)
        await client.produce(SAMPLE, [_record(number) for number in range(SAMPLE_RECORDS)])
    except Conflict:
        pass
    return sum(part.next_offset for part in await client.bounds(SAMPLE))


def _record(number: int) -> Record:
    value = {"order": number, "customer": f"customer-{number % 7}", "total": round(5 + number * 7.3 % 95, 2)}
    return Record(json.dumps(value).encode(), f"customer-{number % 7}".encode())
