"""The endpoints of the admin API for topics: list, create, describe, change, delete, and the groups of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from polywire.broker.broker import Broker
from polywire.broker.permissions import Action
from polywire.broker.settings import TOPIC_SETTINGS, BrokerSettings, TopicSetting, TopicSettings
from polywire.broker.topics import Partition, Topic
from polywire.errors import ErrorCode, Invalid
from polywire.http.encoding import Listing, Slices
from polywire.http.endpoints import ApiCall, Endpoint
from polywire.http.guard import completing
from polywire.http.lag import GROUPS_MAX, GroupLag, topic_lags
from polywire.http.process import Process
from polywire.types import TopicName

TOPICS_MAX: Final = 2_000  # topics of one list
PARTITIONS_MAX: Final = 10_000  # partitions of one topic
_CHANGEABLE: Final = frozenset(name for name, setting in TOPIC_SETTINGS.items() if not setting.is_fixed)
_PARTITIONS: Final = "partitions"
_BUILT_IN: Final = BrokerSettings()


class Topics:
    """The HTTP API's endpoints for topics."""

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker: Final = broker
        self._process: Final = process

    def table(self) -> Sequence[Endpoint]:
        settings = {
            name: f"{setting.spelled}; null for the default" for name, setting in sorted(TOPIC_SETTINGS.items())
        }
        changed = {name: text for name, text in settings.items() if name in _CHANGEABLE}
        path = "/topics/{topic}"
        return [
            Endpoint("GET", "/topics", Action.TOPIC_LIST, "List topics", self._list),
            Endpoint(
                "POST", path, Action.TOPIC_CREATE, "Create a topic", self._create, {_PARTITIONS: "count", **settings}
            ),
            Endpoint("GET", path, Action.TOPIC_DESCRIBE, "Describe a topic and its partitions", self._describe),
            Endpoint(
                "POST", f"{path}/settings", Action.TOPIC_ALTER, "Change settings of a topic", self._configure, changed
            ),
            Endpoint(
                "POST",
                f"{path}/partitions",
                Action.TOPIC_ALTER,
                "Add partitions to a topic",
                self._grow,
                {_PARTITIONS: "new count, above the present one"},
            ),
            Endpoint("DELETE", path, Action.TOPIC_DELETE, "Delete a topic and its records", self._delete),
            Endpoint(
                "GET", f"{path}/groups", Action.GROUP_DESCRIBE, "List a topic's groups with their lag", self._groups
            ),
        ]

    async def _list(self, call: ApiCall) -> Any:
        slices, access = Slices(), self._broker.access
        found = Listing(TOPICS_MAX)
        for topic in self._broker.topics():
            if slices.is_over:
                await slices.rest()
            if not access.permits(call.principal, Action.TOPIC_DESCRIBE, topic):
                continue
            if not found.add({**await _topic_json(topic, slices), "table": self._table_json(call, topic)}):
                break
        can_create = access.permits_somewhere(call.principal, Action.TOPIC_CREATE)
        return {"topics": found.rows, "more": found.more, "can_create": can_create}

    async def _describe(self, call: ApiCall) -> Any:
        slices, topic = Slices(), self._broker.topic(call.path["topic"])
        partitions = await Listing(PARTITIONS_MAX).extend(map(_partition_json, list(topic.partitions)), slices)

        def permits(action: Action) -> bool:
            return self._broker.access.permits(call.principal, action, topic)

        return {
            **await _topic_json(topic, slices),
            "created_at_us": topic.created_at_us,
            "settings": _settings_json(topic.settings),
            "setting_list": [
                _setting_json(name, setting, topic.settings, self._broker.settings)
                for name, setting in TOPIC_SETTINGS.items()
            ],
            "link": topic.settings.link,
            "table": self._table_json(call, topic),
            "has_tables": bool(self._broker.settings.tables_url),
            "can_alter": permits(Action.TOPIC_ALTER),
            "can_delete": permits(Action.TOPIC_DELETE),
            "can_consume": permits(Action.FETCH),
            "can_produce": permits(Action.PRODUCE),
            "can_see_groups": permits(Action.GROUP_DESCRIBE),
            "partition_list": partitions.rows,
        }

    def _table_json(self, call: ApiCall, topic: Topic) -> dict[str, object] | None:
        """Return the state of the topic's table; None if it has none."""
        settings = topic.table_settings(self._broker.settings)
        if settings is None:
            return None
        found: dict[str, object] = {
            "formats": settings.formats.value,
            "freshness_s": settings.freshness_s,
            "url": self._table_url(call, topic),
        }
        report = self._process.tables().get(topic.name.full)
        if report is not None:
            found |= {**msgspec.structs.asdict(report), "age_s": report.age_s(self._broker.clock.now_us())}
        return found

    def _table_url(self, call: ApiCall, topic: Topic) -> str | None:
        """Return the URL of the topic's table; None if the client may not read its files, as in the catalog."""
        access, url = self._broker.access, topic.table_url(self._broker.settings)
        if url.startswith("file:") and not access.sees_files(on_loopback=call.on_loopback):
            return None
        return url if access.permits(call.principal, Action.FETCH, topic) else None

    async def _configure(self, call: ApiCall) -> Any:
        topic = self._broker.topic(call.path["topic"])
        settings = replace(topic.settings, **_settings(call.body))
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._broker.configure_topic(topic, settings, done=completing(done))
        await done
        return {"name": topic.name.full, "settings": _settings_json(topic.settings)}

    async def _create(self, call: ApiCall) -> Any:
        count = _count(call.body.get(_PARTITIONS, self._broker.settings.partition_count))
        given = {name: value for name, value in call.body.items() if name != _PARTITIONS}
        settings = TopicSettings(**_settings(given))
        settings.check()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        name = TopicName.parse(call.path["topic"])
        self._broker.make_topic(name, count, settings, by=call.caller, then=lambda _: None, done=completing(done))
        await done
        return {"name": name.full}

    async def _grow(self, call: ApiCall) -> Any:
        topic, count = self._broker.topic(call.path["topic"]), _count(call.body.get(_PARTITIONS))
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._broker.grow_topic(topic, count, by=call.caller, done=completing(done))
        await done
        return {"name": topic.name.full, _PARTITIONS: len(topic.partitions)}

    async def _delete(self, call: ApiCall) -> Any:
        topic = self._broker.topic(call.path["topic"])
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._broker.delete_topic(topic, done=completing(done))
        await done
        return {"name": topic.name.full}

    async def _groups(self, call: ApiCall) -> Any:
        slices, found = Slices(), Listing(GROUPS_MAX)
        topic = self._broker.topic(call.path["topic"])
        lags, more = await topic_lags(self._broker, topic, slices)
        await found.extend([group_json(self._broker, lag) for lag in lags], slices)
        return {"groups": found.rows, "more": more or found.more}


def group_json(broker: Broker, lag: GroupLag) -> Mapping[str, Any]:
    """Return the row of a group in a list of groups."""
    view = broker.groups.view(lag.group, lag.topic)
    return {
        "group": lag.group,
        "topic": lag.topic,
        "members": 0 if view is None else len(view.members),
        "lag_records": lag.records,
        "lag_seconds": lag.seconds,
    }


def _count(given: Any) -> int:
    if type(given) is not int:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"partitions must be a number got={given!r:.40}")
    return given


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of ``TopicSettings`` from a body, whose names were checked. Raises Invalid(INVALID_REQUEST)."""
    given: dict[str, Any] = {}
    for name, value in body.items():
        is_plain = value is None or isinstance(value, int | str)
        given[name] = TOPIC_SETTINGS[name].read(name, value if is_plain else str(value))
    return given


def _settings_json(settings: TopicSettings) -> Mapping[str, object]:
    return {name: setting.plain(getattr(settings, name)) for name, setting in TOPIC_SETTINGS.items()}


def _setting_json(
    name: str, setting: TopicSetting, settings: TopicSettings, broker: BrokerSettings
) -> Mapping[str, Any]:
    """Return a setting with its value, its default, and where the value comes from.

    ``source`` is ``topic``, ``broker`` if the broker's configuration sets the default, or ``default``.
    """
    own = getattr(settings, name)
    default = getattr(broker, name, setting.default)
    source = "default" if default == getattr(_BUILT_IN, name, setting.default) else "broker"
    if own != setting.default:
        source = "topic"
    return {
        "name": name,
        "value": setting.plain(own if own is not None else default),
        "default": setting.plain(default),
        "source": source,
        "meaning": setting.meaning,
        "allowed": setting.spelled,
        "choices": setting.choices,
        "is_fixed": setting.is_fixed,
    }


def _partition_json(partition: Partition) -> Mapping[str, Any]:
    log = partition.log
    return {
        "partition": partition.number,
        "first_offset": log.first_offset,
        "next_offset": log.next_offset,
        "stored_bytes": log.stored_bytes,
        "last_stored_at_us": log.last_append_time_us or None,
    }


async def _topic_json(topic: Topic, slices: Slices) -> Mapping[str, Any]:
    records = retained = stored = last = 0
    for partition in list(topic.partitions):
        log = partition.log
        records += log.next_offset
        retained += log.next_offset - log.first_offset
        stored += log.stored_bytes
        last = max(last, log.last_append_time_us)
        if slices.is_over:
            await slices.rest()
    return {
        "name": topic.name.full,
        "partitions": len(topic.partitions),
        "records": records,
        "retained_records": retained,
        "stored_bytes": stored,
        "last_stored_at_us": last or None,
    }
