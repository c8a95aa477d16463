"""All simulations by name, in the order in which ``make sim`` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.sim.broker.world import BrokerWorld
from tests.sim.log.world import LogWorld
from tests.sim.shards.world import ShardsWorld
from tests.sim.tables.world import TablesWorld
from tests.sim.takeovers.world import TakeoversWorld
from tests.sim.wires.world import WiresWorld
from tests.sim.world import World

WORLDS: Final[Mapping[str, type[World]]] = {
    world.NAME: world for world in (LogWorld, BrokerWorld, WiresWorld, ShardsWorld, TablesWorld, TakeoversWorld)
}
