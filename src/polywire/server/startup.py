"""Start the broker of one process: on a data directory, on a bucket, or on one of several shards of either.

The modules for buckets need optional packages, so they are imported only if there is a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from polywire.server import lifecycle
from polywire.server.config import ServeConfig
from polywire.server.lines import LineLimit
from polywire.server.placement import check_count
from polywire.server.shard import Shard

if TYPE_CHECKING:
    from polywire.server.bucket_watch import BucketWatch


def run(config: ServeConfig) -> int:
    """Set up logging, serve until a signal stops the process, and return the exit code."""

    return lifecycle.run_logged(config, lambda lines: run_alone(config, lines))


def run_alone(config: ServeConfig, lines: LineLimit) -> int:
    """Serve with a single process until a signal stops it. Raises BrokerError if it cannot start."""
    check_count(config.data_dir, 1)
    if not config.bucket:
        return lifecycle.run_once(lambda: lifecycle.serve(config, lines))
    from polywire.server.bucket_watch import BucketWatch
    from polywire.server.standby import serve_in_turns

    return serve_in_turns(config, lines, BucketWatch(config))


def run_shard(config: ServeConfig, shard: Shard, make_watch: Callable[[], BucketWatch] | None = None) -> int:
    """Serve one of several shards until a signal stops the process, and return the exit code.

    ``make_watch`` creates the bucket statistics. It is set for a shard of a bucket.
    """

    def serving(lines: LineLimit) -> int:
        if make_watch is None:
            return lifecycle.run_once(lambda: lifecycle.serve(config, lines, shard=shard))
        from polywire.server.standby import serve_in_turns

        return serve_in_turns(config, lines, make_watch(), shard)

    return lifecycle.run_logged(config, serving, {"shard": shard.name})
