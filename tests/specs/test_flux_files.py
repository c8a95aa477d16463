"""The two files of the FLUX pages, as a program that reads the data directory sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.flux_peer import PORTS, WAIT_S, Peer, new_topic
from tests.specs.pages import FLUX_GROUPS, FLUX_STORAGE

GROUPS, OFFSETS = "groups.json", "offsets.json"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data_dir = tmp_path_factory.mktemp("files") / "data"
    with BrokerProcess(data_dir, "--any", "127.0.0.1:0", wires=["flux"]) as process:
        yield process


@pytest.fixture(params=PORTS)
def port(request: pytest.FixtureRequest) -> str:
    """Return the protocol's own port, and the one for all protocols."""
    return str(request.param)


def said(broker: BrokerProcess, file: str, group: str, wanted: Callable[[Any], bool]) -> Any:
    """Return a group's entry in a file, once it is as expected."""
    path, end = broker.data_dir / file, time.monotonic() + WAIT_S
    while True:
        found = json.loads(path.read_bytes()).get(group) if path.exists() else None
        if wanted(found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.02)


@FLUX_GROUPS.says(5, "a group has its topic")
@FLUX_GROUPS.says(6, "… its generation")
@FLUX_GROUPS.says(7, "… its assignor")
@FLUX_GROUPS.says(8, "… its members, with the time of each one's last heartbeat")
@FLUX_GROUPS.says(9, "… and its assignments")
@FLUX_GROUPS.says(37, "groups are written to groups.json")
@FLUX_STORAGE.says(37, "groups.json holds the groups")
def test_groups_are_written_to_a_file(broker: BrokerProcess, port: str) -> None:
    topic = new_topic(port)
    before_ms = time.time_ns() // 1_000_000 - 1
    with Peer(broker, port) as peer:
        assert peer.say(f"JOIN|g{topic} {topic} c2 assignor=range") == "OK|generation=2 assigned=[0 1 2]"
        assert peer.say(f"JOIN|g{topic} {topic} c1") == "OK|generation=3 assigned=[0 1]"
        group = said(broker, GROUPS, f"g{topic}", lambda found: found is not None and found["generation"] == 3)
        seen_ms = [member.pop("last_heartbeat_unix_ms") for member in group["members"]]
        assert all(before_ms <= seen <= time.time_ns() // 1_000_000 + 1 for seen in seen_ms)
        assert group == {
            "topic": topic,
            "generation": 3,
            "assignor": "range",
            "member_order": ["c2", "c1"],
            "assignments": {"c1": [0, 1], "c2": [2]},
            "members": [{"consumer_id": "c2"}, {"consumer_id": "c1"}],
        }
        assert peer.say(f"LEAVE|g{topic} {topic} c1 3") == "OK|left=true"
        group = said(broker, GROUPS, f"g{topic}", lambda found: bool(found["generation"] == 4))
        assert group["assignments"] == {"c2": [0, 1, 2]}
    assert (broker.data_dir / GROUPS).stat().st_mode & 0o777 == 0o600


@FLUX_STORAGE.says(36, "offsets.json holds the committed offsets, by group, topic and partition")
def test_offsets_are_written_to_a_file(broker: BrokerProcess, port: str) -> None:
    topic = new_topic(port)
    with Peer(broker, port) as peer:
        peer.say(f"JOIN|g{topic} {topic} c1")
        assert peer.say(f"COMMIT|g{topic} {topic} c1 2 2 42") == "OK|committed=true"
        assert peer.say(f"COMMIT|g{topic} {topic} c1 2 0 7") == "OK|committed=true"
        said(broker, OFFSETS, f"g{topic}", lambda found: bool(found == {topic: {"0": 7, "2": 42}}))
    assert (broker.data_dir / OFFSETS).stat().st_mode & 0o777 == 0o600


def test_files_are_current_at_stops_and_starts(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["flux"]) as broker:
        with Peer(broker, "flux") as peer:
            peer.say("JOIN|g t c1")
            assert peer.say("COMMIT|g t c1 2 2 42") == "OK|committed=true"
        assert broker.stop() == 0
        assert json.loads((broker.data_dir / OFFSETS).read_bytes()) == {"g": {"t": {"2": 42}}}
        assert json.loads((broker.data_dir / GROUPS).read_bytes())["g"]["generation"] == 2
        (broker.data_dir / OFFSETS).write_bytes(b"foreign")
        broker.start()
        said_again = broker.data_dir / OFFSETS
        end = time.monotonic() + WAIT_S
        while said_again.read_bytes() == b"foreign":
            assert time.monotonic() < end
            time.sleep(0.02)
        assert json.loads(said_again.read_bytes()) == {"g": {"t": {"2": 42}}}, "existing content is never read"


@pytest.mark.parametrize(("options", "wires"), [(["--no-flux-exports"], ["flux"]), ([], ["polywire"])])
def test_without_the_option_there_are_no_files(tmp_path: Path, options: list[str], wires: list[str]) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    (data_dir / GROUPS).write_bytes(b"{}\n")
    with BrokerProcess(data_dir, *options, wires=wires):
        assert not (data_dir / GROUPS).exists()
