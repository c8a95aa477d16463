"""What each wire sees of the broker: the bases of its facade and the parts that the wire names, and no more."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from polywire.broker.broker import Broker
from polywire.protocols.cursus.context import CursusBroker
from polywire.protocols.flux.context import FluxBroker
from polywire.protocols.iggy.context import IggyBroker
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.kafka07.context import Kafka07Broker
from polywire.protocols.polywire.context import PolywireBroker
from polywire.protocols.runtime.broker import WireBroker

WIRES: Final = Path(__file__).parents[2] / "src" / "polywire" / "protocols"
SEES: Final[Mapping[type, str]] = {
    CursusBroker: "TopicVerbs RecordVerbs ProducerVerbs PositionVerbs events groups transactions",
    FluxBroker: "TopicVerbs RecordVerbs PositionVerbs WireStateVerbs groups",
    IggyBroker: "TopicVerbs RemovalVerbs RecordVerbs ProducerVerbs PositionVerbs WireStateVerbs groups streams",
    Kafka07Broker: "TopicVerbs RecordVerbs",
    KafkaBroker: "TopicVerbs GroupTopics RemovalVerbs RecordVerbs ProducerVerbs PositionVerbs WireStateVerbs branches classic"
    " consumers epoch transactions",
    PolywireBroker: "TopicVerbs RemovalVerbs StagingVerbs PositionVerbs groups publish_work transactions",
}
INSIDE: Final = {"change_all", "close", "open", "over"}
"""Verbs by which the broker's own parts, or the process, use it."""


def wire_of(port: type) -> str:
    """The wire whose context declares a port."""
    return port.__module__.split(".")[2]


def called_in(tree: ast.AST) -> Iterator[str]:
    """Names that a module asks of something called ``broker``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if name.removeprefix("_") == "broker":
            yield node.attr


def called_by(wire: str) -> set[str]:
    """Everything a wire asks of the broker."""
    texts = [path.read_text(encoding="utf-8") for path in (WIRES / wire).glob("*.py")]
    return {name for text in texts for name in called_in(ast.parse(text))}


def parts_of(port: type) -> dict[str, set[str]]:
    """Bases of the facade that a port is made of, with their verbs, and parts of the broker that it names."""
    parts: dict[str, set[str]] = {}
    for kind in inspect.getmro(port):
        if kind in (WireBroker, *inspect.getmro(WireBroker)):
            continue
        own = {name for name in vars(kind) if not name.startswith("_")}
        if kind in inspect.getmro(Broker):
            parts[kind.__name__] = own | {name for name in inspect.get_annotations(kind) if not name.startswith("_")}
        else:
            parts.update({name: {name} for name in own})
    inherited = {"StagingVerbs": "RecordVerbs", "TopicVerbs": "TopicLookup"}
    for part, base in inherited.items():
        if part in parts:
            parts.pop(base)
    return parts


@pytest.mark.parametrize("port", list(SEES), ids=wire_of)
def test_each_wire_sees_what_is_listed(port: type) -> None:
    assert sorted(parts_of(port)) == sorted(SEES[port].split())


@pytest.mark.parametrize("port", list(SEES), ids=wire_of)
def test_no_wire_sees_what_it_never_calls(port: type) -> None:
    called = called_by(wire_of(port))
    assert not [part for part, verbs in parts_of(port).items() if not called & verbs]


@pytest.mark.parametrize("port", list(SEES), ids=wire_of)
def test_no_wire_calls_what_is_inside_the_broker(port: type) -> None:
    called = called_by(wire_of(port))
    assert not [name for name in called if name in INSIDE or name.startswith("_")]


def test_every_wire_is_listed_and_none_is_given_the_whole_broker() -> None:
    wires = {path.name for path in WIRES.iterdir() if (path / "factory.py").exists()}
    assert wires == {wire_of(port) for port in SEES}
    whole = "polywire.broker.broker import"
    assert not [path for path in WIRES.rglob("*.py") if whole in path.read_text(encoding="utf-8")]


def test_what_is_forbidden_is_found() -> None:
    text = "self.broker._log; shared.broker.change_all(); self._broker.find_topic(name); other.publish()"
    assert sorted(called_in(ast.parse(text))) == ["_log", "change_all", "find_topic"]
