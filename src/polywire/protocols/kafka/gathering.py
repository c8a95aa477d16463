"""Scatter-gather for requests about brokers, topics and topic administration (decision 0128).

Any process can receive such a request. It splits the request by the shards that own the topics. Each shard checks and
executes its part. The combined response is the same as that of a single broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Final

from polywire.errors import PeerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.carrying import Bodies, CarryingKafkaSession, ask_shards, changed, with_ids
from polywire.protocols.kafka.cluster import KEYS_SINCE
from polywire.protocols.kafka.context import node_of
from polywire.protocols.kafka.messages import NO_ID, Api, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import Handler, KafkaSession
from polywire.protocols.kafka.topics import PAGE_PARTITIONS_MAX

METADATA_SINCE: Final = 4  # first version of Metadata that says whether topics may be created
TOPICS_SINCE: Final = 6  # first version of DeleteTopics that names topics by name or id
TOPIC: Final = 2  # resource type of topics


def shard_of(session: CarryingKafkaSession, name: str) -> int:
    """Return the shard that has a topic, or that creates it on the first write."""
    shard = session.shards.shard_of(name)
    return session.shards.home(name) if shard is None else shard


def shard_of_entry(session: CarryingKafkaSession, entry: Any) -> int:
    """Return the shard of the topic that an entry of a request names, by id or name.

    For an unknown id, return this shard, which then reports that the topic does not exist.
    """
    topic_id = getattr(entry, "topic_id", NO_ID)
    if topic_id == NO_ID:
        return shard_of(session, entry.name or "")
    shard = session.elsewhere.shard_of_id(topic_id)
    return session.shards.own if shard is None else shard


def ids_of(entries: Iterable[Any] | None) -> Iterator[bytes]:
    return (getattr(one, "topic_id", NO_ID) for one in entries or ())


def carrying(session: KafkaSession) -> CarryingKafkaSession:
    """Return the session as a ``CarryingKafkaSession``; every session is one if the broker has several processes."""
    assert isinstance(session, CarryingKafkaSession), "only this type of session has these handlers"
    return session


# Addresses of the brokers


class _Places:
    """The last known addresses at which clients of one listener reach the brokers of all shards.

    Every response of a shard has its current address.
    """

    def __init__(self, session: CarryingKafkaSession) -> None:
        self._session: Final = session
        host, port = session.output.local
        self._key: Final = (session.shards.listener_of(port), session.shared.settings.host or host)
        self._put(session.shards.own, session.address)

    def _put(self, shard: int, place: tuple[str, int]) -> None:
        self._session.shared.places[*self._key, shard] = place

    @property
    def unknown(self) -> set[int]:
        """Shards whose broker addresses are not known yet."""
        places = self._session.shared.places
        return {shard for shard in range(self._session.shards.count) if (*self._key, shard) not in places}

    def learn(self, bodies: Bodies) -> None:
        for shard, body in bodies.items():
            if body is None or not body.brokers:
                continue
            self._put(shard, (body.brokers[0].host, body.brokers[0].port))
            if shard == 0:
                self._session.shared.learn_cluster_id(body.cluster_id or "")

    def entries(self, made: Any, field: str) -> list[Any]:
        """Return an entry for each broker whose address is known.

        ``field`` is the name of the field for the node id.
        """
        places = self._session.shared.places
        known = ((shard, places.get((*self._key, shard))) for shard in range(self._session.shards.count))
        return [made(**{field: node_of(shard)}, host=at[0], port=at[1]) for shard, at in known if at is not None]


def metadata(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """Metadata: return a broker for every shard, and the requested topics.

    The request is sent only to shards that have one of these topics, or whose address is unknown.
    """
    session = carrying(session)
    places, asked = _Places(session), request.topics
    if asked is None or (answer.request.version == 0 and not asked):
        bodies = {shard: changed(request, topics=None) for shard in range(session.shards.count)}
        topics = _all_topics
    else:
        by_shard: dict[int, list[Any]] = {shard: [] for shard in places.unknown}
        for one in asked:
            by_shard.setdefault(shard_of_entry(session, one), []).append(one)
        bodies = {shard: changed(request, topics=some) for shard, some in by_shard.items()}
        topics = partial(_named_topics, asked)
    version = max(answer.request.version, METADATA_SINCE)
    ask_shards(session, answer, bodies, partial(_metadata, session, places, topics), version=version)


def _metadata(
    session: CarryingKafkaSession, places: _Places, topics: Callable[[Bodies], list[Any]], bodies: Bodies
) -> Any:
    response = schema.response(Api.METADATA)
    places.learn(bodies)
    return response(
        brokers=places.entries(response.Brokers, "node_id"),
        cluster_id=session.shared.cluster_id,
        controller_id=session.shared.node_id,
        topics=topics(bodies),
    )


def _all_topics(bodies: Bodies) -> list[Any]:
    """Join the topics of all shards.

    Raises PeerError if a shard did not respond, because clients would take its topics for deleted ones.
    """
    if any(body is None for body in bodies.values()):
        raise PeerError("another process of the broker does not respond", fatal=True)
    return [topic for body in bodies.values() for topic in body.topics]


def _named_topics(asked: Iterable[Any], bodies: Bodies) -> list[Any]:
    made = schema.response(Api.METADATA).Topics
    topics_found = [topic for body in bodies.values() if body is not None for topic in body.topics]
    found = {topic.name: topic for topic in topics_found} | {
        topic.topic_id: topic for topic in topics_found if topic.topic_id != NO_ID
    }
    return [
        found.get(one.name if one.topic_id == NO_ID else one.topic_id)
        or made(error=WireError.LEADER_NOT_AVAILABLE, name=one.name, topic_id=one.topic_id)
        for one in asked
    ]


def describe_topic_partitions(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """DescribeTopicPartitions: join the pages of all shards into one page, sorted by name."""
    session = carrying(session)
    bodies: dict[int, Any] = dict.fromkeys(range(session.shards.count), request)
    if request.topics:
        by_shard: dict[int, list[Any]] = {}
        for one in request.topics:
            by_shard.setdefault(shard_of(session, one.name), []).append(one)
        bodies = {shard: changed(request, topics=some) for shard, some in by_shard.items()}
    ask_shards(session, answer, bodies, partial(_joined_pages, request))


def _joined_pages(request: Any, bodies: Bodies) -> Any:
    """Join pages into one.

    The joined page ends where the first incomplete page ends. After that point, topics of the incomplete page's shard
    may be missing.
    """
    response = schema.response(Api.DESCRIBE_TOPIC_PARTITIONS)
    topics = sorted(_all_topics(bodies), key=attrgetter("name"))
    ends = [body.next_cursor for body in bodies.values() if body.next_cursor is not None]
    end = min(ends, key=attrgetter("topic_name", "index"), default=None)
    left, topics_found = min(max(request.response_partition_limit, 1), PAGE_PARTITIONS_MAX), []
    for topic in topics:
        if end is not None and topic.name > end.topic_name:
            break
        shown = topic.partitions[:left]
        if not left or len(shown) < len(topic.partitions):
            end = response.NextCursor(topic_name=topic.name, index=_first_index(request, topic) + len(shown))
        if left:
            topics_found.append(changed(topic, partitions=shown))
        left -= len(shown)
        if end is not None and end.topic_name == topic.name:
            break
    return response(topics=topics_found, next_cursor=end)


def _first_index(request: Any, topic: Any) -> int:
    """Return the number of the first partition of a topic on a page.

    It is 0, unless the previous page has ended within this topic.
    """
    cursor = request.cursor
    return max(cursor.index, 0) if cursor is not None and cursor.topic_name == topic.name else 0


def describe_cluster(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """DescribeCluster: return a broker for every shard. The broker that got the request is the controller."""
    session = carrying(session)
    places, own = _Places(session), session.shards.own

    def made(bodies: Bodies) -> Any:
        body = bodies[own]
        if body is None:
            raise PeerError("the local shard does not respond", fatal=True)
        places.learn(bodies)
        if not body.error:
            body.brokers = places.entries(schema.response(Api.DESCRIBE_CLUSTER).Brokers, "broker_id")
            body.cluster_id = session.shared.cluster_id
        return body

    ask_shards(session, answer, dict.fromkeys(places.unknown | {own}, request), made)


def find_coordinator(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """FindCoordinator: return the broker of the shard that the hash of the name determines.

    The address comes from that shard.
    """
    session = carrying(session)
    response = schema.response(Api.FIND_COORDINATOR)
    nowhere = {"error": WireError.COORDINATOR_NOT_AVAILABLE, "node_id": -1, "host": "", "port": -1}
    if answer.request.version < KEYS_SINCE:
        home = session.shards.home(request.key)
        ask_shards(session, answer, {home: request}, lambda bodies: bodies[home] or response(**nowhere))
        return
    by_home: dict[int, list[str]] = {}
    for key in request.coordinator_keys:
        by_home.setdefault(session.shards.home(key), []).append(key)

    def joined(bodies: Bodies) -> Any:
        found = {one.key: one for body in bodies.values() if body is not None for one in body.coordinators}
        made = response.Coordinators
        return response(coordinators=[found.get(key) or made(key=key, **nowhere) for key in request.coordinator_keys])

    ask_shards(
        session, answer, {shard: changed(request, coordinator_keys=some) for shard, some in by_home.items()}, joined
    )


# Administration of topics

Place = Callable[[CarryingKafkaSession, Any], int]
"""Returns the shard that an entry of a request is for."""


def _named_by(field: str) -> Place:
    """Return a function that returns the shard of the topic that this field of an entry names.

    If ``field`` is empty, the entry itself is the name.
    """
    return lambda session, one: shard_of(session, getattr(one, field) if field else one)


def divided(request_field: str, response_field: str, entry: Callable[[Any, WireError], Any], place: Place) -> Handler:
    """Return a handler that splits a request whose entries name topics.

    ``request_field`` and ``response_field`` are the fields with the entries. ``entry`` builds the response entry for a
    shard that did not respond.
    """

    def handle(session: KafkaSession, answer: Answer, request: Any, /) -> None:
        session = carrying(session)
        by_shard: dict[int, list[Any]] = {}
        for one in getattr(request, request_field) or ():
            by_shard.setdefault(place(session, one), []).append(one)
        bodies = {shard: changed(request, **{request_field: some}) for shard, some in by_shard.items()}
        own = session.shards.own

        def joined(found: Bodies) -> Any:
            made: list[Any] = []
            for shard, body in found.items():
                if body is None:
                    made += [entry(one, WireError.REQUEST_TIMED_OUT) for one in by_shard.get(shard, ())]
                else:
                    made += getattr(body, response_field)
            first = next((body for body in found.values() if body is not None), None)
            return changed(first or schema.response(answer.request.api)(), **{response_field: made})

        # An empty request is sent to this shard, which reports what is wrong with it.
        ask_shards(session, answer, bodies or {own: request}, joined, again=False)

    return handle


def divided_resources(response_field: str) -> Handler:
    """Return a handler that splits a request about settings.

    Settings of a topic are handled by the shard of the topic, and settings of the broker by the process that got the
    request.
    """

    def handle(session: KafkaSession, answer: Answer, request: Any, /) -> None:
        session = carrying(session)
        by_shard: dict[int, list[Any]] = {}
        for one in request.resources:
            own = session.shards.own
            shard = shard_of(session, one.resource_name) if one.resource_type == TOPIC else own
            by_shard.setdefault(shard, []).append(one)
        made = getattr(schema.response(answer.request.api), response_field.capitalize())

        def unanswered(one: Any) -> Any:
            error = WireError.REQUEST_TIMED_OUT
            return made(error=error, resource_type=one.resource_type, resource_name=one.resource_name)

        def joined(found: Bodies) -> Any:
            entries: list[Any] = []
            for shard, body in found.items():
                entries += map(unanswered, by_shard[shard]) if body is None else getattr(body, response_field)
            return schema.response(answer.request.api)(**{response_field: entries})

        bodies = {shard: changed(request, resources=some) for shard, some in by_shard.items()}
        ask_shards(session, answer, bodies, joined, again=answer.request.api is Api.DESCRIBE_CONFIGS)

    return handle


def create_topics(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """CreateTopics: distribute new topics over the shards, beginning with the one that has the fewest topics.

    If the names of topics determine their shards, as with a bucket, those shards are used.
    """
    names = dict.fromkeys(one.name for one in request.topics)
    shards = carrying(session).shards
    new = (name for name in names if shards.shard_of(name) is None)
    first = shards.least_loaded()
    chosen = {name: (first + number) % shards.count for number, name in enumerate(new)}

    def place(session: CarryingKafkaSession, one: Any) -> int:
        return chosen[one.name] if one.name in chosen else shard_of(session, one.name)

    divided("topics", "topics", _named(Api.CREATE_TOPICS, "Topics"), place)(session, answer, request)


def delete_topics(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """The request names topics by name or by id."""
    made = _named(Api.DELETE_TOPICS, "Responses")
    if answer.request.version < TOPICS_SINCE:
        divided("topic_names", "responses", made, _named_by(""))(session, answer, request)
    else:
        divided("topics", "responses", made, shard_of_entry)(session, answer, request)


def _named(api: Api, entries: str) -> Callable[[Any, WireError], Any]:
    def made(one: Any, error: WireError) -> Any:
        topic_id = {"topic_id": one.topic_id} if hasattr(one, "topic_id") else {}
        return getattr(schema.response(api), entries)(name=getattr(one, "name", one), error=error, **topic_id)

    return made


def _elections(one: Any, error: WireError) -> Any:
    made = schema.response(Api.ELECT_LEADERS).ReplicaElectionResults
    return made(
        topic=one.topic,
        partition_result=[made.PartitionResult(partition_id=number, error=error) for number in one.partitions],
    )


TOPIC_HANDLERS: Final[Mapping[Api, Handler]] = {
    Api.METADATA: with_ids(metadata, lambda request: ids_of(request.topics)),
    Api.DESCRIBE_CLUSTER: describe_cluster,
    Api.DESCRIBE_TOPIC_PARTITIONS: describe_topic_partitions,
    Api.FIND_COORDINATOR: find_coordinator,
    Api.CREATE_TOPICS: create_topics,
    Api.DELETE_TOPICS: with_ids(delete_topics, lambda request: ids_of(request.topics)),
    Api.CREATE_PARTITIONS: divided("topics", "results", _named(Api.CREATE_PARTITIONS, "Results"), _named_by("name")),
    Api.ELECT_LEADERS: divided("topic_partitions", "replica_election_results", _elections, _named_by("topic")),
    Api.DESCRIBE_CONFIGS: divided_resources("results"),
    Api.ALTER_CONFIGS: divided_resources("responses"),
    Api.INCREMENTAL_ALTER_CONFIGS: divided_resources("responses"),
}
