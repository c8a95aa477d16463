"""Who this process is among those that may lead a shard of a bucket.

Promises: a name is short and plain enough for what it is written into. Must not know: who else there is.
"""

from __future__ import annotations

import platform

from polywire.cluster.chain import NODE_BYTES_MAX
from polywire.cluster.nodes import DRAINED, Candidate
from polywire.cluster.shards import FIRST
from polywire.errors import ErrorCode, Invalid
from polywire.names import is_simple
from polywire.server.config import ServeConfig


def candidate_of(config: ServeConfig, shard: int = FIRST, shards: int = 1) -> Candidate:
    """Who this process is; without a shard the only one of its machine. Raises Invalid."""
    found = Candidate(_machine(config), shard, shards)
    if len(found.name) > NODE_BYTES_MAX:
        limit = NODE_BYTES_MAX - len(found.name) + len(found.machine)
        raise Invalid(
            ErrorCode.INVALID_NAME,
            f"node name is invalid: with several processes, use at most {limit} plain characters name={found.machine!r}",
        )
    return found


def _machine(config: ServeConfig) -> str:
    """The machine's name among those of the bucket. Raises Invalid."""
    name = config.node or platform.node() or "node"
    if not is_simple(name) or not 0 < len(name) <= NODE_BYTES_MAX or name.startswith(DRAINED):
        raise Invalid(
            ErrorCode.INVALID_NAME,
            f"node name is invalid (use at most {NODE_BYTES_MAX} plain characters, not beginning with {DRAINED!r}) name={name!r}",
        )
    return name
