"""The endpoints of the admin API for the process, topics, records and groups.

Lists have limits, and contain only what the user may see. ``Endpoints`` has checked the permission of each request.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from math import isfinite
from typing import Any, Final

from polywire.broker.access import Access
from polywire.broker.broker import Broker
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.build_info import VERSION
from polywire.errors import Conflict, ErrorCode, Invalid, Missing
from polywire.http.dead_letters import DeadLetters, Redrive
from polywire.http.downloads import Downloads
from polywire.http.encoding import Listing, Slices
from polywire.http.endpoints import ApiCall, Endpoint, partition_of
from polywire.http.guard import completing
from polywire.http.health import readiness
from polywire.http.history import INTERVAL_S, totals
from polywire.http.lag import GROUPS_MAX, group_lags, partition_lags
from polywire.http.links import LinkEndpoints, failing_links
from polywire.http.process import BucketRequests, BucketView, Process
from polywire.http.queues import QueueEndpoints
from polywire.http.quotas import QuotaEndpoints
from polywire.http.records import READERS_MAX, RECORDS_MAX, RecordReader
from polywire.http.search import filter_of
from polywire.http.sql import Sql
from polywire.http.topics import PARTITIONS_MAX, Topics, group_json
from polywire.http.users import Users
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records
from polywire.types import KeyHash, Level, PositionKind

QUANTILE: Final = 0.99
MEMBERS_MAX: Final = 1_000  # members of one group
CONNECTIONS_MAX: Final = 1_000  # clients in one list
OFFSET_MAX: Final = 2**63 - 1
RECORDS_USUAL: Final = 50


def bucket_json(bucket: BucketView) -> Mapping[str, Any]:
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
        "requests": [_requests(requests) for requests in bucket.requests],
        "charges": [
            {"kind": charge.kind, "requests": charge.requests, "price": charge.price, "cost": charge.cost}
            for charge in bucket.charges
        ],
    }


def _requests(requests: BucketRequests) -> Mapping[str, Any]:
    """Return the JSON object of one kind of request.

    ``p99_s`` is an upper bound of the 99th percentile since the process started. It is null if the percentile is above
    the highest bound of the histogram.
    """
    bound_s = requests.durations.quantile(QUANTILE)
    return {
        "verb": requests.verb,
        "outcome": requests.outcome,
        "requests": requests.durations.count,
        "seconds": round(requests.durations.sum_s, 6),
        "p99_s": bound_s if isfinite(bound_s) else None,
    }


class Api:
    """The HTTP API's endpoints of one broker."""

    def __init__(self, broker: Broker, process: Process, redrive: Redrive, changes: Access) -> None:
        """``changes`` changes the users of all processes."""
        self._broker: Final = broker
        self._users: Final = Users(broker, changes)
        self._quotas: Final = QuotaEndpoints(broker, changes)
        self._reader: Final = RecordReader(broker)
        # limits the memory for resent records; a request may hold as much as the largest batch
        self._copies: Final = asyncio.Semaphore(READERS_MAX)
        self._redrive: Final = redrive
        self._process: Final = process
        self._round_robin = 0

    def table(self) -> Sequence[Endpoint]:
        records = {
            "offset": "first offset; by default the earliest",
            "time": "instead of offset: from this append time on (ISO 8601)",
            "tail": f"instead of offset: number of newest records, up to {RECORDS_MAX}",
            "before": "with tail: only records before this offset",
            "key": "only records with this key",
            "search": "only records with this text in key, value or headers; the case of ASCII letters is ignored",
            "json": "only records whose JSON value has this field, such as items[*].price >= 10; the comparison, one of "
            "= != < <= > >= ~ (contains), may be missing",
            "limit": f"maximum number of records, up to {RECORDS_MAX}",
            "whole": "1 returns values in full",
        }
        produced = {
            "value": "text, or null",
            "value_base64": "base64, instead of value",
            "key": "text",
            "key_base64": "base64, instead of key",
            "headers": "object with string values",
            "partition": "by default selected by key, or round-robin",
        }
        reset = {
            "to": "earliest, latest, an offset or an ISO 8601 time",
            "partition": "only this partition",
            "dry_run": "true shows the changes without making them",
        }
        path = "/topics/{topic}"
        return [
            Endpoint("GET", "/overview", Action.SERVER_DESCRIBE, "State of the broker", self._overview),
            Endpoint("GET", "/history", Action.SERVER_DESCRIBE, "Activity of the last hour", self._history),
            Endpoint("GET", "/settings", Action.SERVER_DESCRIBE, "Effective settings", self._settings),
            Endpoint("GET", "/connections", Action.SERVER_DESCRIBE, "Connected clients", self._connections),
            *Topics(self._broker, self._process).table(),
            Endpoint("POST", f"{path}/records", Action.PRODUCE, "Produce a record", self._produce, produced),
            Endpoint(
                "POST",
                f"{path}/resend",
                Action.FETCH,
                "Produce a stored record again, in its partition",
                self._resend,
                {"partition": "of the record", "offset": "of the record"},
                also=Action.PRODUCE,
            ),
            Endpoint(
                "GET", f"{path}/partitions/{{partition}}/records", Action.FETCH, "Read records", self._records, records
            ),
            Endpoint("GET", "/groups", Action.GROUP_LIST, "List groups with their lag", self._groups),
            Endpoint("GET", f"{path}/groups/{{group}}", Action.GROUP_DESCRIBE, "Describe a group", self._group),
            Endpoint(
                "POST", f"{path}/groups/{{group}}/reset", Action.OFFSET_COMMIT, "Reset offsets", self._reset, reset
            ),
            *Downloads(self._broker, self._reader, self._offset_of).table(),
            *DeadLetters(self._broker, self._reader, self._redrive).table(),
            *Sql(self._process).table(),
            *LinkEndpoints(self._process, self._broker).table(),
            *self._users.table(),
            *self._quotas.table(),
            *QueueEndpoints(self._broker).table(),
        ]

    # The process

    async def _overview(self, call: ApiCall) -> Any:
        broker = self._broker
        found = await totals(broker, Slices())
        status, text = await readiness(broker, self._process)
        bucket = self._process.bucket()
        return {
            "version": VERSION,
            "at_us": broker.clock.now_us(),
            "ready": status == 200,
            "readiness": text.strip(),
            "congested": broker.congested,
            "topics": len(broker.topics()),
            "partitions": found.partitions,
            "records": found.records,
            "stored_bytes": found.stored_bytes,
            "refused": self._process.refused,
            "connections_max": self._process.connections_max,
            "listeners": self._process.listeners(),
            "bucket": None if bucket is None else bucket_json(bucket),
            "failing_links": failing_links(self._process),
            "wires": {wire or "unknown": asdict(traffic) for wire, traffic in sorted(self._process.traffic().items())},
        }

    async def _history(self, call: ApiCall) -> Any:
        return {"interval_s": INTERVAL_S, "samples": [asdict(sample) for sample in self._process.history()]}

    async def _settings(self, call: ApiCall) -> Any:
        return {"settings": dict(self._process.settings())}

    async def _connections(self, call: ApiCall) -> Any:
        found = list(islice(self._process.connections(), CONNECTIONS_MAX + 1))
        shown = await Listing(CONNECTIONS_MAX).extend(found, Slices())
        return {"connections": shown.rows, "more": shown.more}

    # Records

    async def _records(self, call: ApiCall) -> Any:
        partition = self._partition(call)
        limit = call.number("limit", RECORDS_USUAL, least=1, most=RECORDS_MAX)
        offset = call.number("offset", 0, most=OFFSET_MAX)
        wanted, whole = filter_of(call.query), call.query.get("whole") == "1"
        if "time" in call.query:
            offset = await self._offset_at(partition, _time_us(call.query["time"]))
        elif "tail" in call.query:
            count = call.number("tail", 0, most=RECORDS_MAX)
            before = call.number("before", OFFSET_MAX, most=OFFSET_MAX)
            return await self._reader.page_before(partition, before, limit=count, wanted=wanted, whole=whole)
        return await self._reader.page(partition, offset, limit=limit, wanted=wanted, whole=whole)

    async def _produce(self, call: ApiCall) -> Any:
        topic = self._broker.topic(call.path["topic"])
        headers = call.body.get("headers", {})
        if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
            raise Invalid(ErrorCode.INVALID_REQUEST, "headers must be an object with string values")
        if not call.body.keys() & {"value", "value_base64"}:
            message = "value or value_base64 is required (null makes a record without a value, which deletes its key)"
            raise Invalid(ErrorCode.INVALID_REQUEST, message)
        key = _bytes(call.body, "key")
        record = Record(
            _bytes(call.body, "value"),
            key,
            tuple(Header(name.encode(), value.encode()) for name, value in headers.items()),
        )
        partition = self._select_partition(topic, key, call.body.get("partition"))
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._broker.produce(
            partition, from_records([record]), by=call.caller, level=Level.SYNCED, done=completing(done)
        )
        return {"partition": partition.number, "offset": await done}

    async def _resend(self, call: ApiCall) -> Any:
        partition = partition_of(self._broker.topic(call.path["topic"]), call.body.get("partition"))
        copies: list[bytearray] = []
        async with self._copies:
            await self._reader.read_one(
                partition, call.body.get("offset"), lambda rows, index: copies.append(rows.copy(index))
            )
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._broker.produce(partition, copies.pop(), by=call.caller, level=Level.SYNCED, done=completing(done))
            return {"partition": partition.number, "offset": await done}

    def _select_partition(self, topic: Topic, key: bytes | None, number: Any) -> Partition:
        partitions = topic.written_to()
        if number is not None:
            return partition_of(topic, number)
        if key is not None:
            return self._broker.partition_of_key(topic, key, KeyHash.FNV32)
        self._round_robin += 1
        return partitions[self._round_robin % len(partitions)]

    def _partition(self, call: ApiCall) -> Partition:
        number = call.path["partition"]
        topic = self._broker.topic(call.path["topic"])
        return partition_of(topic, int(number) if number.isascii() and number.isdigit() and len(number) < 9 else -1)

    async def _offset_at(self, partition: Partition, time_us: int) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        found = partition.log.offset_at(time_us, completing(future))
        return found if isinstance(found, int) else await future

    # Groups

    async def _groups(self, call: ApiCall) -> Any:
        broker = self._broker

        def permits(topic: Topic) -> bool:
            return broker.access.permits(call.principal, Action.GROUP_DESCRIBE, topic)

        slices, found = Slices(), Listing(GROUPS_MAX)
        lags, more = await group_lags(broker, slices, count_max=GROUPS_MAX, permits=permits)
        await found.extend([group_json(broker, lag) for lag in lags], slices)
        return {"groups": found.rows, "more": more or found.more}

    async def _group(self, call: ApiCall) -> Any:
        broker, name, slices = self._broker, call.path["group"], Slices()
        topic = broker.topic(call.path["topic"])
        lags = await partition_lags(broker, topic, name, slices, seconds=True)
        view = broker.groups.view(name, topic.name.full)
        if view is None and all(lag.committed is None for lag in lags):
            raise Missing(ErrorCode.GROUP_MISSING, f"no such group name={name!r} topic={topic.name.full!r}")
        members = await Listing(MEMBERS_MAX).extend(() if view is None else view.members, slices)
        partitions = await Listing(PARTITIONS_MAX).extend(lags, slices)
        return {
            "group": name,
            "topic": topic.name.full,
            "members": members.rows,
            "partitions": partitions.rows,
            "more": members.more or partitions.more,
        }

    async def _reset(self, call: ApiCall) -> Any:
        broker, name, to = self._broker, call.path["group"], call.text("to")
        topic = broker.topic(call.path["topic"])
        view = broker.groups.view(name, topic.name.full)
        if view is not None and view.members:
            raise Conflict(
                ErrorCode.GROUP_NOT_EMPTY,
                f"group has members (stop them first) group={name!r} members={len(view.members)}",
            )
        only = call.body.get("partition")
        partitions = list(topic.partitions) if only is None else [partition_of(topic, only)]
        before = broker.positions_in(topic.name.full, PositionKind.GROUP, name)
        slices, rows = Slices(), Listing(PARTITIONS_MAX)
        offsets: dict[int, int] = {}
        for partition in partitions:
            log, offset = partition.log, await self._reset_to(partition, to)
            offset = offsets[partition.number] = min(max(offset, log.first_offset), log.readable_offset)
            rows.add(
                {
                    "partition": partition.number,
                    "committed": before.get(partition.number),
                    "new": offset,
                    "lag_records": log.readable_offset - offset,
                }
            )
            if slices.is_over:
                await slices.rest()
        dry_run = call.body.get("dry_run", False) is not False
        if not dry_run:
            done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            commit = partial(broker.commit_positions, topic.name.full, offsets, PositionKind.GROUP, name)
            commit(by=call.caller, level=Level.SYNCED, done=completing(done))
            await done
        return {"group": name, "topic": topic.name.full, "dry_run": dry_run, "partitions": rows.rows}

    async def _offset_of(self, partition: Partition, text: str) -> int:
        """Convert a text, which is an offset or an ISO 8601 time, to an offset."""
        if text.isascii() and text.isdigit() and len(text) < 19:
            return int(text)
        return await self._offset_at(partition, _time_us(text))

    async def _reset_to(self, partition: Partition, to: str) -> int:
        if to == "earliest":
            return partition.log.first_offset
        if to == "latest":
            return partition.log.readable_offset
        return await self._offset_of(partition, to)


def _bytes(body: Mapping[str, Any], name: str) -> bytes | None:
    """Return a field of the body as bytes: the text of ``{name}``, or the decoded base64 of ``{name}_base64``.

    Raises Invalid(INVALID_REQUEST) if both are set, or the value cannot be decoded.
    """
    text, coded = body.get(name), body.get(f"{name}_base64")
    if text is not None and coded is not None:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} is set twice (send either {name} or {name}_base64)")
    try:
        if isinstance(coded, str):
            return b64decode(coded, validate=True)
        if text is None and coded is None:
            return None
        if isinstance(text, str):
            return text.encode()
    except (NotBase64, UnicodeEncodeError):
        pass
    raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} must be a string (use {name}_base64 for bytes)")


def _time_us(text: str) -> int:
    """Parse an ISO 8601 time. Without a time zone it is UTC. Raises Invalid(INVALID_REQUEST) for another format."""
    try:
        at = datetime.fromisoformat(text)
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"time is not ISO 8601 got={text[:40]!r}") from None
    return int(seconds * 1_000_000)
