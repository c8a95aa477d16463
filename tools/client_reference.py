"""The reference page of the Python client, generated from its docstrings. Every public name must have one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any, Final

import polywire
from polywire import testing
from polywire.client import blocking, lane
from polywire.client.client import Client
from polywire.client.consumer import Consumer
from polywire.client.notices import Rebalance
from polywire.client.producer import Producer, Receipt, Receipts
from polywire.client.queue import Job, Queue
from polywire.client.record import Record
from polywire.client.transaction import Transaction

CLASSES: Final = (
    Client,
    Producer,
    Receipt,
    Receipts,
    lane.Delivery,
    Consumer,
    Queue,
    Job,
    Transaction,
    Rebalance,
    Record,
    blocking.SyncClient,
    blocking.SyncProducer,
    blocking.SyncReceipt,
    blocking.SyncConsumer,
    blocking.SyncQueue,
    blocking.SyncJob,
)
FUNCTIONS: Final = (("polywire.connect", polywire.connect), ("polywire.connect_sync", polywire.connect_sync))
TABLES: Final = (
    ("polywire.scan", polywire.scan),
    ("polywire.read_arrow", polywire.read_arrow),
    ("polywire.read_pandas", polywire.read_pandas),
    ("polywire.read_polars", polywire.read_polars),
    ("polywire.scan_polars", polywire.scan_polars),
    ("polywire.to_duckdb", polywire.to_duckdb),
    ("polywire.sql", polywire.sql),
)
TESTING: Final = (("polywire.testing.broker", testing.broker),)
_SECTION: Final = re.compile(r"^(Args|Raises|Example):$", re.MULTILINE)


def client_page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Python client"
    yield ""
    yield "The [guide](../develop/python.md) shows how to use these together."
    for name, call in (*FUNCTIONS, *TABLES, *TESTING):
        yield from _call(f"`{name}{_signature(call)}`", call, level=2)
    for kind in CLASSES:
        yield ""
        yield f"## `{kind.__name__}`"
        yield from _text(kind)
        if "__init__" in vars(kind) and kind.__init__.__doc__:
            yield from _call(f"`{kind.__name__}{_signature(kind.__init__)}`", kind.__init__, level=3)
        elif "__new__" in vars(kind):
            yield from _call(f"`{kind.__name__}{_signature(kind.__new__)}`", kind.__new__, level=3)
        for name, member in vars(kind).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                yield from _call(f"`{kind.__name__}.{name}`", member, level=3)
            elif callable(member):
                yield from _call(f"`{kind.__name__}.{name}{_signature(member)}`", member, level=3)


def _call(title: str, call: Any, *, level: int) -> Iterator[str]:
    yield ""
    yield f"{'#' * level} {title}"
    yield from _text(call)


def _signature(call: Any) -> str:
    found = inspect.signature(call)
    parameters = [one for name, one in found.parameters.items() if name not in ("self", "cls")]
    shown = [f"*{one.name}" if one.kind is one.VAR_POSITIONAL else one.name for one in parameters]
    shown = [
        name if one.default is one.empty else f"{name}={_default(one.default)}"
        for name, one in zip(shown, parameters, strict=True)
    ]
    shown = [
        f"**{one.name}" if one.kind is one.VAR_KEYWORD else name for name, one in zip(shown, parameters, strict=True)
    ]
    first = next((at for at, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY), None)
    if first is not None and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        shown.insert(first, "*")
    return f"({', '.join(shown)})"


def _default(value: object) -> str:
    return str(value) if type(value).__module__ == "polywire.types" else repr(value)


def _text(thing: Any) -> Iterator[str]:
    """Yield a docstring as Markdown: sections become paragraphs, arguments a list, examples code."""
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    parts = _SECTION.split(text.replace("``", "`"))
    yield ""
    yield parts[0].strip()
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        yield ""
        if name == "Example":
            yield "```python"
            yield dedent(body.strip("\n")).rstrip()
            yield "```"
            continue
        yield f"{'Arguments' if name == 'Args' else name}:"
        yield ""
        items, after = _end_of_section(body)
        yield from _items(dedent(items))
        if after:
            yield ""
            yield after


def _end_of_section(body: str) -> tuple[str, str]:
    """Return a section's indented lines, and the text after them, which is not indented."""
    lines = body.strip("\n").splitlines()
    end = next((at for at, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return "\n".join(lines[:end]).rstrip(), "\n".join(lines[end:]).strip()


def _items(body: str) -> Iterator[str]:
    """Yield ``name: meaning`` as a list; indented lines continue an item."""
    item: list[str] = []
    for line in [*body.splitlines(), ""]:
        if item and (not line or not line.startswith(" ")):
            name, _, meaning = " ".join(item).partition(": ")
            yield f"* `{name}`: {meaning}"
            item = []
        if line:
            item.append(line.strip())
