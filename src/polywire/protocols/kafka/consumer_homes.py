"""ConsumerGroupHeartbeat at a group's coordinator, if topics are in several processes (decision 0128).

* The first response to a member already includes partitions of topics in other shards, unless a shard does not respond.
* The shards that own the topics check the member's permissions.
* If a shard does not respond, its topics stay assigned.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from polywire.broker.groups.consumer import TOPICS_MAX
from polywire.protocols.kafka import consumer_groups
from polywire.protocols.kafka.between_shards import Match, Seen, answered, asked
from polywire.protocols.kafka.carrying import Bodies, CarryingKafkaSession, ask_each, once
from polywire.protocols.kafka.consumer_groups import Found
from polywire.protocols.kafka.gathering import carrying
from polywire.protocols.kafka.patterns import Pattern, PatternError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession

# how long a shard may take to match a pattern; a slower shard's topics are not searched this time
LOOK_LIMIT_S: Final = 1.0


def consumer_group_heartbeat(session: KafkaSession, answer: Answer, request: Any, /) -> Any:
    """ConsumerGroupHeartbeat.

    It is processed when the shards have responded about the topics that it names.
    """
    session = carrying(session)
    look = partial(_look, session, answer, request)
    beat = partial(consumer_groups.heartbeat, session, answer, request, look)
    names = request.subscribed_topic_names
    if names is None or len(names) > TOPICS_MAX:  # the heartbeat is rejected in this case
        return beat()
    once(session, answer, partial(session.elsewhere.known, names), beat)
    return None


def _look(
    session: CarryingKafkaSession, answer: Answer, request: Any, pattern: Pattern, found: set[str], then: Found
) -> None:
    """Search the topics of all shards for those that match a pattern.

    If a shard does not respond, the topics that the member has in that shard are used.
    """
    shards = session.shards
    had = session.broker.consumers.topics_of(request.group_id, request.member_id)

    def here(refused: PatternError | None, saw_all: bool) -> None:
        if refused is not None:
            then(refused, saw_all)
            return
        question = asked(Match(pattern.text))
        others = {shard: question for shard in range(shards.count) if shard != shards.own}
        ask_each(session, answer, others, there, again=False, limit_s=LOOK_LIMIT_S)

    def there(bodies: Bodies) -> None:
        saw_all = True
        for shard, body in bodies.items():
            seen = answered(Seen, body)
            if seen is not None and seen.error:
                then(PatternError(seen.message), saw_all)
                return
            if seen is None:
                saw_all = False
                found.update(name for name in had if shards.shard_of(name) == shard)
            else:
                session.elsewhere.learn(shard, seen)
                found.update(topic.known().name.full for topic in seen.topics)
        then(None, saw_all)

    consumer_groups.look_here(session, answer, pattern, found, here)
