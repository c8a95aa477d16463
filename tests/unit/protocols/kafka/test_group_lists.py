"""Groups as tools see them, in every version (spec: kafka#describing-groups, kafka#deleting-groups)."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.protocols.kafka.messages import NO_OPERATIONS, Api, WireError
from polywire.testing.memory_broker import MemoryBroker
from tests.unit.protocols.kafka.group_dialogue import Asker
from tests.unit.protocols.kafka.test_groups import member_of, subscription, sync, versions
from tests.unit.protocols.kafka.test_positions import commit


@pytest.fixture
def peer() -> Asker:
    memory = MemoryBroker()
    memory.broker.ensure_topic("t")
    return Asker(memory)


def describe(peer: Asker, *groups: str, version: int = 6, **fields: Any) -> Any:
    return peer.ask(Api.DESCRIBE_GROUPS, version, groups=list(groups), **fields).groups


@pytest.mark.parametrize("version", versions(Api.LIST_GROUPS))
def test_lists_in_every_version(peer: Asker, version: int) -> None:
    commit(peer, group_id="positions")
    sync(peer, member_of(peer), 1)
    answer = peer.ask(Api.LIST_GROUPS, version)
    assert answer.error == WireError.NONE
    listed = {group.group_id: group for group in answer.groups}
    assert {name: group.protocol_type for name, group in listed.items()} == {"g": "consumer", "positions": ""}
    if version >= 4:
        assert (listed["g"].group_state, listed["positions"].group_state) == ("Stable", "Empty")
        only = peer.ask(Api.LIST_GROUPS, version, states_filter=["stable", "Dead"])
        assert [group.group_id for group in only.groups] == ["g"]
    if version >= 5:
        assert listed["g"].group_type == "classic"
        assert peer.ask(Api.LIST_GROUPS, version, types_filter=["consumer"]).groups == []
        assert len(peer.ask(Api.LIST_GROUPS, version, types_filter=["Classic"]).groups) == 2


@pytest.mark.parametrize("version", versions(Api.DESCRIBE_GROUPS))
def test_descriptions_in_every_version(peer: Asker, version: int) -> None:
    commit(peer, group_id="positions")
    member = member_of(peer)
    joining, positions, missing = describe(peer, "g", "positions", "missing", version=version)
    assert joining.group_state == "CompletingRebalance"
    assert (positions.group_state, positions.protocol_type, positions.members) == ("Empty", "", [])
    assert missing.group_state == "Dead"
    assert missing.error == (WireError.GROUP_ID_NOT_FOUND if version >= 6 else WireError.NONE)
    sync(peer, member, 1)
    [stable] = describe(peer, "g", version=version)
    assert (stable.group_state, stable.protocol_type, stable.protocol_data) == ("Stable", "consumer", "range")
    [reported] = stable.members
    assert (reported.member_id, reported.client_id, reported.client_host) == (member, "me", "/127.0.0.1")
    assert (bytes(reported.member_metadata), bytes(reported.member_assignment)) == (subscription("t"), b"mine")


def test_operations_are_returned_on_request(peer: Asker) -> None:
    assert describe(peer, "g")[0].operations == NO_OPERATIONS
    assert describe(peer, "g", want_operations=True)[0].operations == 1 << 3 | 1 << 6 | 1 << 8


def test_groups_of_other_protocols_are_described(peer: Asker) -> None:
    peer.broker.groups.join("g", "t", "m", wire="flux")
    [reported] = describe(peer, "g")
    assert (reported.group_state, [member.member_id for member in reported.members]) == ("Stable", ["m"])
    assert peer.ask(Api.DELETE_GROUPS, 2, groups_names=["g"]).results[0].error == WireError.NON_EMPTY_GROUP


@pytest.mark.parametrize("version", versions(Api.DELETE_GROUPS))
def test_deletions_in_every_version(peer: Asker, version: int) -> None:
    commit(peer, group_id="positions")
    member = member_of(peer)
    answer = peer.ask(Api.DELETE_GROUPS, version, groups_names=["g", "positions", "missing"])
    assert {reported.group_id: reported.error for reported in answer.results} == {
        "g": WireError.NON_EMPTY_GROUP,
        "positions": WireError.NONE,
        "missing": WireError.GROUP_ID_NOT_FOUND,
    }
    peer.ask(Api.LEAVE_GROUP, 1, group_id="g", member_id=member)
    assert peer.ask(Api.DELETE_GROUPS, version, groups_names=["g"]).results[0].error == WireError.NONE
    assert peer.ask(Api.LIST_GROUPS, 4).groups == []
