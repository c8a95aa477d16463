"""The part of the broker that each protocol uses: the bases of its facade and the listed parts, and no more."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from polywire.broker import api
from polywire.broker.broker import Broker
from polywire.broker.state import WriteBatchVerbs
from polywire.protocols.cursus.context import CursusBroker
from polywire.protocols.flux.context import FluxBroker
from polywire.protocols.iggy.context import IggyBroker
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.kafka07.context import Kafka07Broker
from polywire.protocols.polywire.context import PolywireBroker
from polywire.protocols.runtime.broker import WireBroker

WIRES: Final = Path(__file__).parents[2] / "src" / "polywire" / "protocols"
SEES: Final[Mapping[type, str]] = {
    CursusBroker: "TopicVerbs RecordVerbs ProducerVerbs PositionVerbs events groups participants transactions",
    FluxBroker: "TopicVerbs RecordVerbs PositionVerbs WireStateVerbs groups",
    IggyBroker: "TopicVerbs RemovalVerbs RecordVerbs ProducerVerbs PositionVerbs WireStateVerbs groups streams",
    Kafka07Broker: "Topics Records",
    KafkaBroker: "TopicVerbs GroupTopics RemovalVerbs RecordVerbs ProducerVerbs PositionVerbs WireStateVerbs participants classic"
    " consumers shares transactions",
    PolywireBroker: "TopicVerbs RemovalVerbs StagingVerbs PositionVerbs groups publish_work shares transactions",
}
INSIDE: Final = {"change_all", "close", "open", "over"}
"""Methods that only the broker's own parts or the process use."""


def wire_of(port: type) -> str:
    """Return the protocol whose context declares a port."""
    return port.__module__.split(".")[2]


def called_in(tree: ast.AST) -> Iterator[str]:
    """Return names that a module uses of something called ``broker``, or ``local`` for the broker of this process."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if name.removeprefix("_") in ("broker", "local"):
            yield node.attr


def called_by(wire: str) -> set[str]:
    """Return everything that a protocol uses of the broker."""
    texts = [path.read_text(encoding="utf-8") for path in (WIRES / wire).glob("*.py")]
    return {name for text in texts for name in called_in(ast.parse(text))}


def parts_of(port: type) -> dict[str, set[str]]:
    """Return the facade bases of a port with their methods, and the broker parts that it names."""
    parts: dict[str, set[str]] = {}
    for kind in inspect.getmro(port):
        if kind in (WireBroker, WriteBatchVerbs, *inspect.getmro(WireBroker)):
            continue
        own = {name for name in vars(kind) if not name.startswith("_")}
        if kind in inspect.getmro(Broker) or kind.__module__ == api.__name__:
            parts[kind.__name__] = own | {name for name in inspect.get_annotations(kind) if not name.startswith("_")}
        else:
            parts.update({name: {name} for name in own})
    inherited = {"StagingVerbs": "RecordVerbs", "TopicVerbs": "TopicLookup"}
    for part, base in inherited.items():
        if part in parts:
            parts.pop(base)
    return parts


@pytest.mark.parametrize("port", list(SEES), ids=wire_of)
def test_each_protocol_sees_what_is_listed(port: type) -> None:
    assert sorted(parts_of(port)) == sorted(SEES[port].split())


@pytest.mark.parametrize("port", list(SEES), ids=wire_of)
def test_no_protocol_sees_what_it_never_calls(port: type) -> None:
    called = called_by(wire_of(port))
    assert not [part for part, verbs in parts_of(port).items() if not called & verbs]


@pytest.mark.parametrize("port", list(SEES), ids=wire_of)
def test_no_protocol_calls_internals_of_the_broker(port: type) -> None:
    called = called_by(wire_of(port))
    assert not [name for name in called if name in INSIDE or name.startswith("_")]


def test_every_protocol_is_listed_and_none_gets_the_whole_broker() -> None:
    wires = {path.name for path in WIRES.iterdir() if (path / "factory.py").exists()}
    assert wires == {wire_of(port) for port in SEES}
    whole = "polywire.broker.broker import"
    assert not [path for path in WIRES.rglob("*.py") if whole in path.read_text(encoding="utf-8")]


def test_forbidden_calls_are_found() -> None:
    text = "self.broker._log; shared.broker.change_all(); self._broker.find_topic(name); other.publish()"
    assert sorted(called_in(ast.parse(text))) == ["_log", "change_all", "find_topic"]
