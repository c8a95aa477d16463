"""``python -m tools.kafka_types``: generate the types of Kafka's messages, for the type checker, from their table.

Guarantees: the same table gives the same stub; tests/house/test_kafka_types.py fails if the stub is out of date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka.schema import Field, Structure
from polywire.protocols.kafka.structures import Kind

STUB: Final = Path(schema.__file__).with_name("message_types.pyi")

_HEAD: Final = '''\
"""The types of all messages. ``python -m tools.kafka_types`` generates this file from the table of messages.

An array that a version lacks is an empty tuple. Copy it before you append to it.
"""

from typing import Any, Literal, dataclass_transform, overload

from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka.structures import Record
from polywire.types import Buffer

@dataclass_transform(kw_only_default=True)
class _Structure(Record): ...
'''
_INDENT: Final = "    "
_NUMBERS: Final = dict.fromkeys((Kind.I8, Kind.I16, Kind.I32, Kind.I64), "int")
_TYPES: Final = {
    **_NUMBERS,
    Kind.BOOL: "bool",
    Kind.F64: "float",
    Kind.ID: "bytes",
    Kind.TEXT: "str",
    Kind.BYTES: "bytes",
    Kind.RECORDS: "Buffer",
}


def stub() -> str:
    """Return the text of the stub."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield from _HEAD.splitlines()
    for api in Api:
        message = schema.message(api)
        for structure in (message.request, message.response):
            yield ""
            yield from _class(structure.record.__name__, structure, "")
    yield ""
    for verb in ("request", "response"):
        for api in Api:
            record = getattr(schema, verb)(api)
            yield "@overload"
            yield f"def {verb}(api: Literal[Api.{api.name}]) -> type[{record.__name__}]: ..."
        yield "@overload"
        yield f"def {verb}(api: Api) -> Any: ..."


def _class(name: str, structure: Structure, indent: str) -> Iterator[str]:
    head = f"{indent}class {name}(_Structure):"
    if not structure.fields:
        yield f"{head} ..."
        return
    yield head
    inner = indent + _INDENT
    for field in structure.fields:
        if field.structure is not None:
            yield from _class(field.type_name, field.structure, inner)
            yield ""
    for field in structure.fields:
        yield f"{inner}{field.name}: {_type(field)} = ..."


def _type(field: Field) -> str:
    single = _TYPES[field.kind] if field.structure is None else field.type_name
    found = f"list[{single}]" if field.is_array else single
    is_nullable = field.nullable_from is not None or (field.tag is not None and field.default is None)
    return f"{found} | None" if is_nullable else found


if __name__ == "__main__":
    STUB.write_text(stub(), "utf-8")
