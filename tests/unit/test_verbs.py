"""The benchmark of stalls sends every request of every protocol: new requests need a worst case there."""

from __future__ import annotations

from benchmarks.verbs import all_verbs
from polywire.protocols.cursus.factory import COMMANDS as CURSUS
from polywire.protocols.flux.factory import ADMIN_COMMANDS, DATA_COMMANDS
from polywire.protocols.iggy.factory import COMMANDS as IGGY
from polywire.protocols.iggy.messages import Code
from polywire.protocols.kafka.codec import decode_head, decode_wide_body
from polywire.protocols.kafka.factory import COMMANDS as KAFKA
from polywire.protocols.kafka07.messages import RequestType
from polywire.protocols.polywire.messages import Verb


def known() -> set[tuple[str, str]]:
    found = {("flux", name) for name in DATA_COMMANDS.keys() | ADMIN_COMMANDS.keys()}
    found |= {("cursus", name) for name in CURSUS if name}
    found |= {("iggy", Code(code).name) for code in IGGY}
    found |= {("kafka", api.name) for api in KAFKA}
    found |= {("kafka07", kind.name) for kind in RequestType}
    return found | {("polywire", verb.name) for verb in Verb}


def test_every_request_is_covered() -> None:
    asked = {(asked.wire, asked.verb) for asked in all_verbs()}
    assert not known() - asked


def test_requests_of_kafka_can_be_built() -> None:
    asked = [asked for asked in all_verbs() if asked.wire == "kafka"]
    made = set()
    for one in asked:
        frame = memoryview(one.make())[4:]
        head, at = decode_head(frame)
        *_, body = decode_wide_body(frame, head, at)
        assert body is not None
        made.add(head.api.name)
    assert made == {api.name for api in KAFKA}


def test_every_covered_request_exists() -> None:
    asked = {(asked.wire, asked.verb.partition(" ")[0].rstrip("*")) for asked in all_verbs()}
    assert not asked - known()
