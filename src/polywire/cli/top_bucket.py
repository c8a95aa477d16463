"""The tables of ``polywire top`` about the bucket that stores the log.

Rates and means are computed from the differences between two samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

MONTH_S: Final = 30 * 86_400

Rows = list[dict[str, Any]]


def bucket_rows(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> dict[str, Rows]:
    """Return rows about this broker and its bucket, all brokers, requests by verb and outcome, and requests by price."""
    earlier = before or now
    names = ("node", "shard", "epoch", "unstored_bytes", "unstored_seconds", "journal_objects", "cache_bytes")
    this_broker = {name: now[name] for name in names}
    for name in ("put", "got"):
        moved = max(now[f"{name}_bytes"] - earlier[f"{name}_bytes"], 0)
        this_broker[f"{name}_bytes_per_s"] = round(moved / seconds, 1)
    return {
        "bucket": [this_broker],
        "brokers": [{name: node[name] for name in ("name", "state", "epoch")} for node in now["nodes"]],
        "requests": _requests(earlier["requests"], now["requests"], seconds),
        "charges": _charges(earlier["charges"], now["charges"], seconds),
    }


def _requests(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], seconds: float) -> Rows:
    earlier_by_request = {(count["verb"], count["outcome"]): count for count in before}
    rows = []
    for count in now:
        earlier = earlier_by_request.get((count["verb"], count["outcome"]), {"requests": 0, "seconds": 0.0})
        requests = max(count["requests"] - earlier["requests"], 0)
        took_ms = 1e3 * max(count["seconds"] - earlier["seconds"], 0.0)
        rows.append(
            {
                "request": count["verb"],
                "outcome": count["outcome"],
                "requests_per_s": round(requests / seconds, 1),
                "mean_ms": round(took_ms / requests, 1) if requests else None,
                "p99_ms": None if count["p99_s"] is None else round(1e3 * count["p99_s"], 1),
                "requests": count["requests"],
            }
        )
    return rows


def _charges(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], seconds: float) -> Rows:
    """Return rows by kind of charge. If prices are configured, they include the cost so far and for 30 days at this
    rate.
    """
    earlier_requests = {charge["kind"]: charge["requests"] for charge in before}
    rows: Rows = []
    for charge in now:
        per_s = max(charge["requests"] - earlier_requests.get(charge["kind"], 0), 0) / seconds
        row = {"charged_as": charge["kind"], "requests": charge["requests"], "requests_per_s": round(per_s, 1)}
        if charge["price"] is not None:
            row |= {
                "price_per_1000": charge["price"],
                "cost": round(charge["cost"], 4),
                "cost_of_30_days": round(per_s * MONTH_S * charge["price"] / 1000, 2),
            }
        rows.append(row)
    return rows
