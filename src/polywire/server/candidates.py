"""The name of this process among the brokers of a bucket."""

from __future__ import annotations

import platform

from polywire.cluster.journal_chain import NODE_BYTES_MAX
from polywire.cluster.nodes import DRAINED, Candidate
from polywire.errors import ErrorCode, Invalid
from polywire.names import is_simple
from polywire.server.config import ServeConfig
from polywire.store.objects import FIRST


def candidate_of(config: ServeConfig, shard: int = FIRST, shards: int = 1) -> Candidate:
    """Return the name under which this process tries to lead a shard. Raises Invalid if the node name is invalid."""
    candidate = Candidate(_machine(config), shard, shards)
    if len(candidate.name) > NODE_BYTES_MAX:
        limit = NODE_BYTES_MAX - len(candidate.name) + len(candidate.machine)
        raise Invalid(
            ErrorCode.INVALID_NAME,
            f"node name is invalid: with several processes, use at most {limit} plain characters name={candidate.machine!r}",
        )
    return candidate


def _machine(config: ServeConfig) -> str:
    """Return the configured node name, or the host name. Raises Invalid."""
    name = config.node or platform.node() or "node"
    if not is_simple(name) or not 0 < len(name) <= NODE_BYTES_MAX or name.startswith(DRAINED):
        raise Invalid(
            ErrorCode.INVALID_NAME,
            f"node name is invalid (use at most {NODE_BYTES_MAX} plain characters, not beginning with {DRAINED!r}) name={name!r}",
        )
    return name
