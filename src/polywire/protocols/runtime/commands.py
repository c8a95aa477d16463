"""Commands of a protocol: their names, handlers and permissions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar

from polywire.broker.permissions import ANYBODY, Action

_Name = TypeVar("_Name")
_Handler = TypeVar("_Handler")


@dataclass(frozen=True, slots=True)
class Command(Generic[_Name, _Handler]):
    """A request type of a protocol. Each protocol has a subclass, which adds the handler's type and further fields.

    Attributes:
        name: name of the command in requests: a word, or a number as a member of the protocol's enum.
        handler: executes one request.
        actions: permissions to check. If there are several, the protocol decides which one is needed.
        pipelined: whether the command may start before earlier requests are answered. Other commands wait, so that they
            see the effects of earlier requests.
        anonymous: whether unauthenticated clients may use the command.
    """

    name: _Name
    handler: _Handler
    actions: tuple[Action, ...]
    _: KW_ONLY
    pipelined: bool = False
    anonymous: bool = field(init=False)

    def __post_init__(self) -> None:
        assert self.actions, f"command has no actions command={self.name}"
        object.__setattr__(self, "anonymous", ANYBODY.issuperset(self.actions))


_Command = TypeVar("_Command", bound=Command[Any, Any])


def table(*commands: _Command) -> Mapping[Any, _Command]:
    """Return the commands by name."""
    by_name: dict[Any, _Command] = {}
    for command in commands:
        assert command.name not in by_name, f"two commands have the same name command={command.name}"
        by_name[command.name] = command
    return by_name
