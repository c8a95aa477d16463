"""A process of one of several shards, with clients and links, put together as the server does it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

from polywire.broker.settings import BrokerSettings
from polywire.errors import Busy, ErrorCode
from polywire.log.settings import LogSettings
from polywire.protocols.runtime.session import SessionFactory
from polywire.protocols.runtime.shards import KEY_BYTES, LinkPeer
from polywire.server.config import Address, ServeConfig
from polywire.server.placement import Board
from polywire.server.shard import Shard, SocketLink
from polywire.server.wires import shard_factories
from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.process import DIRECTORY
from tests.sim.shards.links import LinkEnds, Reach, running
from tests.sim.shards.turns import Together
from tests.sim.story import Story
from tests.sim.wires.network import SERVER, Caller, Link, SimulatedConnection
from tests.sim.wires.process import WiresProcess

CONFIG: Final = ServeConfig(data_dir=DIRECTORY, cursus_idle_timeout_s=86_400.0)  # clients may be silent for long
KEY: Final = bytes(range(KEY_BYTES))


class SimulatedNames:
    """Implements ``Names``: topics are in the shard that their creator chose, as on a directory."""

    waits: Final = False

    def __init__(self, own: int, places: Mapping[str, int]) -> None:
        """places: shards by topic."""
        self._own: Final = own
        self._places: Final = places

    def shard_of(self, full_name: str) -> int | None:
        return self._places.get(full_name)

    def claim(self, full_name: str) -> None:
        if self._places.get(full_name, self._own) != self._own:
            raise Busy(ErrorCode.BUSY, f"another shard has a topic with this name name={full_name!r}")

    def release(self, full_name: str) -> None:
        """Do nothing: the name stays ours."""

    def begin(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._places.get(name) != self._own]


class SimulatedShard(Shard):
    """Guards: its links are those of its process."""

    def __init__(self, own: int, board: Board, names: SimulatedNames, ends: LinkEnds) -> None:
        addresses = [Address("", shard) for shard in range(board.count)]
        super().__init__(own, board, names, addresses, None, KEY)  # type: ignore[arg-type]  # it has no listener
        self._ends: Final = ends
        listener: Any = SimpleNamespace(name="kafka", address=Address(*SERVER))
        self.opened([listener], [listener], host="", is_advertised=False)

    def connect(self, shard: int, peer: LinkPeer) -> SocketLink:
        """Open a link from this process."""
        with running(self._ends):
            return SocketLink(self._addresses[shard], peer)


class ShardProcess(WiresProcess):
    """Guards: ``ends`` are the links that it has opened."""

    ends: LinkEnds
    connections_max = 200  # of clients, and links of their sessions
    _inside: Sequence[SessionFactory]

    def __init__(
        self,
        disk: SimulatedDisk,
        log_settings: LogSettings,
        settings: BrokerSettings,
        clock: SimulatedClock,
        chance: Chance,
        story: Story,
        *,
        own: int,
        board: Board,
        places: Mapping[str, int],
        reach: Reach,
        together: Together,
    ) -> None:
        """places: shards by topic."""
        super().__init__(disk, log_settings, settings, clock, chance, story)
        self.turns = together
        self._own: Final = own
        self._board: Final = board
        self._places: Final = places
        self._reach: Final = reach

    def _make_factories(self) -> Sequence[SessionFactory]:
        self.ends = LinkEnds(self._own, self.loop, self._reach, self.files.story)
        shard = SimulatedShard(self._own, self._board, SimulatedNames(self._own, self._places), self.ends)
        beginning = shard.begin(self.broker)
        with suppress(StopIteration):  # it has nothing to wait for
            beginning.send(None)
        outside, inside, _ = shard_factories(self.broker, CONFIG, shard)
        self._inside = [inside]
        return outside

    def accept_link(self, caller: Caller) -> Link:
        """Accept a link from another process of this broker."""
        return self.network.connect(caller, SimulatedConnection(self.hub, self._inside))
