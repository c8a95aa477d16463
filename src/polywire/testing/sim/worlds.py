"""All simulations by name, in the order in which ``make sim`` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from polywire.testing.sim.broker.world import BrokerWorld
from polywire.testing.sim.log.world import LogWorld
from polywire.testing.sim.shards.world import ShardsWorld
from polywire.testing.sim.wires.world import WiresWorld
from polywire.testing.sim.world import World

WORLDS: Final[Mapping[str, type[World]]] = {
    world.NAME: world for world in (LogWorld, BrokerWorld, WiresWorld, ShardsWorld)
}
