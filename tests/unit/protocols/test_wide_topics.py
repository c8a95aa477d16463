"""Topics of thousands of partitions over each protocol are created in slices; later requests see them."""

from __future__ import annotations

from polywire.broker.topic_verbs import AT_ONCE_MAX
from polywire.protocols.cursus.messages import frame
from polywire.protocols.iggy.client_codec import ident, name, request
from polywire.protocols.iggy.messages import U32, Code
from tests.unit.protocols.cursus.dialogue import World as CursusWorld
from tests.unit.protocols.flux.dialogue import World as FluxWorld
from tests.unit.protocols.iggy.dialogue import World as IggyWorld

COUNT = AT_ONCE_MAX + 100


def test_flux() -> None:
    peer = FluxWorld().connect()
    last = COUNT + AT_ONCE_MAX
    peer.feed(
        b"V1|1|ADMIN_CREATE_TOPIC|t %d 1\nV1|2|CONSUME|t %d 0\nV1|3|PING|\n" % (COUNT, COUNT - 1)
        + b"V1|4|ADMIN_CREATE_TOPIC|t %d 1\nV1|5|CONSUME|t %d 0\n" % (last + 1, last)
    )
    assert not peer.sent, "it is created in slices"
    peer.pass_by()
    answers = [line.split("|")[:3] for line in peer.take().decode().splitlines()]
    assert [number for _, number, _ in answers] == ["1", "2", "3", "4", "5"]
    assert [word for _, number, word in answers if number != "3"] == ["OK"] * 4


def test_flux_refuses_a_concurrent_creation() -> None:
    world = FluxWorld()
    peers = world.connect(), world.connect()
    for peer in peers:
        peer.feed(b"V1|1|ADMIN_CREATE_TOPIC|t %d 1\n" % COUNT)
    peers[0].pass_by()
    answers = [peer.take().decode() for peer in peers]
    assert answers[0].startswith(f"V1|1|OK|topic=t partitions={COUNT} replication_factor=1 ")
    assert answers[1].startswith("V1|1|ERR|")


def test_cursus() -> None:
    world = CursusWorld()
    peer, late = world.connect(), world.connect()
    peer.feed(
        frame(b"CREATE topic=t partitions=%d" % COUNT)
        + frame(b"CREATE topic=t partitions=%d" % (COUNT + AT_ONCE_MAX + 1))
        + frame(b"DELETE topic=t")
    )
    late.feed(frame(b"CREATE topic=t partitions=%d" % COUNT))
    assert not peer.sent, "it is created in slices"
    peer.pass_by()
    answers = [body.decode() for body in peer.take_bodies()]
    assert [answer.partition(" cleanup")[0] for answer in answers] == [
        f"OK topic=t partitions={COUNT}",
        f"OK topic=t partitions={COUNT + AT_ONCE_MAX + 1}",
        "OK topic=t deleted=true",
    ]
    assert b"create_topic_failed" in late.take_bodies()[0]


def test_iggy() -> None:
    world = IggyWorld()
    peer, late = world.connect(), world.connect()
    topic = ident("default") + ident(7)
    for each in (peer, late):
        each.classic(Code.PING)
    for each, called in ((peer, "t"), (late, "u")):
        made = ident("default") + U32.pack(7) + U32.pack(COUNT) + U32.pack(0) + name(called)
        each.feed(request(Code.CREATE_TOPIC, made))
        assert not each.sent, "it is created in slices"
    peer.feed(
        request(Code.CREATE_PARTITIONS, topic + U32.pack(COUNT))
        + request(Code.DELETE_PARTITIONS, topic + U32.pack(2 * COUNT - 1))
        + request(Code.PURGE_TOPIC, topic)
        + request(Code.GET_TOPIC, topic)
    )
    peer.pass_by()
    answer = peer.take()
    assert [U32.unpack_from(answer, 8 * number)[0] for number in range(5)] == [0] * 5
    broker = world.memory.broker
    assert [len(broker.topic(each).partitions) for each in ("t", "u")] == [1, COUNT]
    numbers = {peer.classic(Code.GET_TOPIC, ident("default") + ident(each))[1][:4] for each in ("t", "u")}
    assert len(numbers) == 2, "the id was taken meanwhile"
