"""LOCATE is refused like FETCH, and returns nothing if sealed records are not in files."""

from __future__ import annotations

import pytest

from polywire.errors import Conflict, ErrorCode, Invalid, Missing
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Verb
from tests.unit.protocols.polywire.peer import Peer, batch_of


@pytest.fixture
def peer() -> Peer:
    made = Peer()
    made.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 1)).decode(messages.TopicDescription)
    for value in (b"0", b"1", b"2"):
        made.ask(Verb.PRODUCE, messages.Produce("t", 0), batch_of(value)).decode(messages.Produced)
    return made


def test_the_log_in_memory_has_no_directory(peer: Peer) -> None:
    located = peer.ask(Verb.LOCATE, messages.Locate("t", 0, 1)).decode(messages.Located)
    assert located == messages.Located("", b"", [], more=False)


@pytest.mark.parametrize(
    ("head", "kind", "code"),
    [
        (messages.Locate("none", 0, 0), Missing, ErrorCode.TOPIC_MISSING),
        (messages.Locate("t", 1, 0), Missing, ErrorCode.PARTITION_MISSING),
        (messages.Locate("t", -1, 0), Missing, ErrorCode.PARTITION_MISSING),
        (messages.Locate("t", 0, 4), Missing, ErrorCode.OFFSET_OUT_OF_RANGE),
        (messages.Locate("t", 0, -1), Invalid, ErrorCode.INVALID_REQUEST),
        (messages.Locate("t", 0, 2, 1), Invalid, ErrorCode.INVALID_REQUEST),
        (messages.Locate("t", 0, 0, incarnation=999), Conflict, ErrorCode.TOPIC_REPLACED),
        (messages.Locate("t", 0, 0, 4, epoch=1), Conflict, ErrorCode.EPOCH_ENDED),
        (messages.Locate("t", 0, 0, 2**63 - 1, epoch=2), Missing, ErrorCode.OFFSET_OUT_OF_RANGE),
    ],
)
def test_locate_is_refused_like_a_fetch(
    peer: Peer, head: messages.Locate, kind: type[Exception], code: ErrorCode
) -> None:
    fetch = messages.Fetch(head.name, head.partition, head.offset, head.offset_end, head.incarnation, head.epoch)
    refused = peer.ask(Verb.LOCATE, head).error
    alike = peer.ask(Verb.FETCH, fetch).error
    assert isinstance(refused, kind)
    assert refused.code is code
    assert (refused.code, refused.message) == (alike.code, alike.message)
