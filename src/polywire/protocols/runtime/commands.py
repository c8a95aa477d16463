"""What a wire's table of commands is made of, in the same words on every wire.

Promises: a table names each command once, and each command its actions. Must not know: any wire's bytes, how a command is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar

from polywire.broker.actions import ANYBODY, Action

_Name = TypeVar("_Name")
_Handler = TypeVar("_Handler")


@dataclass(frozen=True, slots=True)
class Command(Generic[_Name, _Handler]):
    """A command of a wire. Each wire has a subclass, which names its handlers, and says what only this wire asks of its commands.

    name: as requests say it: a word, or a member of the wire's enum of numbers. handler: carries out one request. actions: what it asks
    for; with several, the wire says which of them when. pipelined: whether it may begin before requests ahead of it are answered; any other
    waits for them, and so sees all that they did. anonymous: whether also those may use it who have not logged in.
    """

    name: _Name
    handler: _Handler
    actions: tuple[Action, ...]
    _: KW_ONLY
    pipelined: bool = False
    anonymous: bool = field(init=False)

    def __post_init__(self) -> None:
        assert self.actions, f"nothing says who may use it command={self.name}"
        object.__setattr__(self, "anonymous", ANYBODY.issuperset(self.actions))


_Command = TypeVar("_Command", bound=Command[Any, Any])


def table(*commands: _Command) -> Mapping[Any, _Command]:
    """The commands by name."""
    by_name: dict[Any, _Command] = {}
    for command in commands:
        assert command.name not in by_name, f"two commands have one name command={command.name}"
        by_name[command.name] = command
    return by_name
