"""Command descriptors, and every protocol's table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from polywire.broker.permissions import Action
from polywire.protocols.cursus.factory import COMMANDS as CURSUS
from polywire.protocols.flux.factory import ADMIN_COMMANDS, DATA_COMMANDS
from polywire.protocols.iggy.factory import COMMANDS as IGGY
from polywire.protocols.kafka07.factory import COMMANDS as KAFKA07
from polywire.protocols.polywire.factory import COMMANDS as POLYWIRE
from polywire.protocols.runtime.commands import Command, table

TABLES: dict[str, Mapping[Any, Command[Any, Any]]] = {
    "cursus": CURSUS,
    "flux": {**DATA_COMMANDS, **ADMIN_COMMANDS},
    "iggy": IGGY,
    "kafka07": KAFKA07,
    "polywire": POLYWIRE,
}


def handle() -> None:
    """Stand in for a handler."""


@dataclass(frozen=True, slots=True)
class Odd(Command[str, object]):
    """A protocol's own command class."""

    odd: bool = False


def test_a_command_is_anonymous_if_all_its_actions_are() -> None:
    assert Command("hello", handle, (Action.CONNECT,)).anonymous
    assert not Command("whoami", handle, (Action.SELF_DESCRIBE,)).anonymous
    assert not Command("both", handle, (Action.CONNECT, Action.FETCH)).anonymous


def test_a_command_waits_for_earlier_ones_unless_declared_otherwise() -> None:
    assert not Command("last", handle, (Action.CONNECT,)).pipelined
    assert Command("next", handle, (Action.CONNECT,), pipelined=True).pipelined


def test_a_protocol_can_add_fields_to_commands() -> None:
    odd = Odd("odd", handle, (Action.CONNECT,), pipelined=True, odd=True)
    assert (odd.anonymous, odd.pipelined, odd.odd) == (True, True, True)


def test_a_command_needs_an_action() -> None:
    with pytest.raises(AssertionError, match="has no actions"):
        Command("free", handle, ())


def test_a_name_is_in_a_table_once() -> None:
    one, other = (Command(name, handle, (Action.CONNECT,)) for name in ("one", "other"))
    assert table(one, other) == {"one": one, "other": other}
    with pytest.raises(AssertionError, match="the same name"):
        table(one, other, one)


@pytest.mark.parametrize("wire", TABLES)
def test_every_protocol_has_its_commands_by_name(wire: str) -> None:
    assert TABLES[wire]
    assert all(command.name == name for name, command in TABLES[wire].items())
    assert any(command.pipelined for command in TABLES[wire].values())
