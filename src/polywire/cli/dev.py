"""``polywire dev``: a broker to try things with: all wires, and a topic that has records and gets more.

Promises: without a directory of one's own nothing is left of it when it ends. Must not know: how serving works, any wire.
"""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.cli.output import note
from polywire.cli.usage import examples
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.errors import BrokerError, Conflict
from polywire.records.columns import Record
from polywire.server import lifecycle, startup
from polywire.server.config import ServeConfig
from polywire.types import spell_address

SAMPLE: Final = "sample"
SAMPLE_PARTITIONS: Final = 3
SAMPLE_RECORDS: Final = 100
SLOT_BYTES: Final = 17 * 1024 * 1024  # the smallest that every wire's largest request fits
READY_POLL_S: Final = 0.02
ANYWHERE: Final = "127.0.0.1:0"

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
        Path | None, Parameter(help="Data directory; a temporary one that is removed at the end, if not set.")
    ] = None,
    free_ports: Annotated[bool, Parameter(negative="", help="Listen on free ports instead of the usual ones.")] = False,
    rate: Annotated[
        float,
        Parameter(help="Records per second that are added to the topic sample.", validator=Number(gte=0, lte=1000)),
    ] = 2.0,
) -> int:
    """Run a broker to try things with until SIGTERM or SIGINT: all wires on this machine alone, and a topic with records."""
    with ExitStack() as stack:
        made = Path(stack.enter_context(TemporaryDirectory(prefix="polywire-dev-")))
        ready = made / "ready.json"
        config = ServeConfig(data_dir=data_dir or made / "data", ready_file=ready, slot_bytes=SLOT_BYTES)
        if free_ports:
            config = _on_free_ports(config)
        over = threading.Event()
        sampler = threading.Thread(target=_sample, args=(ready, rate, over), name="polywire-sample", daemon=True)
        sampler.start()
        try:
            return startup.run(config)
        finally:
            over.set()
            sampler.join()


def _on_free_ports(config: ServeConfig) -> ServeConfig:
    """The same, with every listener where the system chooses."""
    at = ANYWHERE
    return replace(config, flux=at, cursus=at, kafka=at, kafka07=at, iggy=at, polywire=at, http=at)


def _sample(ready: Path, rate: float, over: threading.Event) -> None:
    """Once the broker listens, fill the topic and say where everything is; then go on at this rate."""
    while not ready.exists():
        if over.wait(READY_POLL_S):
            return
    listeners = json.loads(ready.read_text(encoding="utf-8"))
    url = _url("polywire", listeners["polywire"])
    try:
        asyncio.run(_feed(url, listeners, rate, over))
    except BrokerError as error:
        if not over.is_set():
            note(f"no more samples: {error.message}")


def _url(wire: str, at: dict[str, Any]) -> str:
    """Where a listener of the ready file is, for clients."""
    return f"{wire}://{spell_address(at['host'], at['port'])}"


async def _feed(url: str, listeners: dict[str, dict[str, Any]], rate: float, over: threading.Event) -> None:
    client = await connect(url)
    try:
        number = await _fill(client)
        print(json.dumps({name: _url(name, at) for name, at in listeners.items()}), flush=True)
        note(f"ready topic={SAMPLE} records={number}; try: polywire record tail {SAMPLE} --address {url}")
        while not await asyncio.to_thread(over.wait, 1 / rate if rate else None):
            await client.produce(SAMPLE, [_record(number)])
            number += 1
    finally:
        await client.close()


async def _fill(client: WireClient) -> int:
    """Make the topic with its first records, unless a directory has it from before; returns how many there are."""
    try:
        await client.create_topic(SAMPLE, SAMPLE_PARTITIONS)
        await client.produce(SAMPLE, [_record(number) for number in range(SAMPLE_RECORDS)])
    except Conflict:
        pass
    return sum(part.next_offset for part in await client.bounds(SAMPLE))


def _record(number: int) -> Record:
    """An order that nobody placed."""
    value = {"order": number, "customer": f"customer-{number % 7}", "total": round(5 + number * 7.3 % 95, 2)}
    return Record(json.dumps(value).encode(), f"customer-{number % 7}".encode())
