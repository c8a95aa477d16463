"""The admin API's description of the bucket that holds the log."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

from polywire.http.process import BucketRequests, BucketView

QUANTILE: Final = 0.99


def bucket_json(bucket: BucketView) -> Mapping[str, Any]:
    """Return the JSON object of a leader's bucket."""
    shard = bucket.shard
    return {
        "url": bucket.url,
        "id": bucket.id,
        "node": bucket.node,
        "shard": shard.shard,
        "epoch": shard.start,
        "unstored_bytes": shard.unstored_bytes,
        "unstored_seconds": round(shard.unstored_s, 3),
        "journal_objects": shard.objects,
        "journal_objects_max": bucket.objects_max,
        "cache_bytes": shard.cached_bytes,
        "cache_bytes_max": bucket.cached_bytes_max,
        "led": bucket.led,
        "deposed": bucket.deposed,
        "put_bytes": bucket.put_bytes,
        "got_bytes": bucket.got_bytes,
        "nodes": [{"name": node.name, "state": node.state, "epoch": node.start} for node in bucket.nodes],
        "requests": [_requests(one) for one in bucket.requests],
        "charges": [
            {"kind": one.kind, "requests": one.requests, "price": one.price, "cost": one.cost} for one in bucket.charges
        ],
    }


def _requests(one: BucketRequests) -> Mapping[str, Any]:
    """Return the JSON object of one kind of request.

    ``p99_s`` is an upper bound, computed from the histogram since the process started; null above the last bucket.
    """
    bound_s = one.durations.quantile(QUANTILE)
    return {
        "verb": one.verb,
        "outcome": one.outcome,
        "requests": one.durations.count,
        "seconds": round(one.durations.sum_s, 6),
        "p99_s": bound_s if isfinite(bound_s) else None,
    }
