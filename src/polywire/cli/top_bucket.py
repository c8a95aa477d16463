"""What ``polywire top`` shows of the bucket that holds the log.

Promises: rates and means are of what happened between two looks. Must not know: how the broker is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

MONTH_S: Final = 30 * 86_400

Rows = list[dict[str, Any]]


def bucket_rows(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> dict[str, Rows]:
    """Rows of this broker at its bucket, of all brokers, of requests by verb and outcome, and of what stores charge for."""
    earlier = before or now
    names = ("node", "shard", "epoch", "unstored_bytes", "unstored_seconds", "journal_objects", "cache_bytes")
    lead = {name: now[name] for name in names}
    for name in ("put", "got"):
        moved = max(now[f"{name}_bytes"] - earlier[f"{name}_bytes"], 0)
        lead[f"{name}_bytes_per_s"] = round(moved / seconds, 1)
    return {
        "bucket": [lead],
        "brokers": [{name: node[name] for name in ("name", "state", "epoch")} for node in now["nodes"]],
        "requests": _requests(earlier["requests"], now["requests"], seconds),
        "charges": _charges(earlier["charges"], now["charges"], seconds),
    }


def _requests(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], seconds: float) -> Rows:
    known = {(one["verb"], one["outcome"]): one for one in before}
    rows = []
    for one in now:
        earlier = known.get((one["verb"], one["outcome"]), {"requests": 0, "seconds": 0.0})
        count = max(one["requests"] - earlier["requests"], 0)
        took_ms = 1e3 * max(one["seconds"] - earlier["seconds"], 0.0)
        rows.append(
            {
                "request": one["verb"],
                "outcome": one["outcome"],
                "requests_per_s": round(count / seconds, 1),
                "mean_ms": round(took_ms / count, 1) if count else None,
                "p99_ms": None if one["p99_s"] is None else round(1e3 * one["p99_s"], 1),
                "requests": one["requests"],
            }
        )
    return rows


def _charges(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], seconds: float) -> Rows:
    """With what a month of this rate would cost; nothing of cost where no price was told."""
    known = {one["kind"]: one["requests"] for one in before}
    rows: Rows = []
    for one in now:
        per_s = max(one["requests"] - known.get(one["kind"], 0), 0) / seconds
        row = {"charged_as": one["kind"], "requests": one["requests"], "requests_per_s": round(per_s, 1)}
        if one["price"] is not None:
            row |= {
                "price_per_1000": one["price"],
                "cost": round(one["cost"], 4),
                "cost_of_30_days": round(per_s * MONTH_S * one["price"] / 1000, 2),
            }
        rows.append(row)
    return rows
