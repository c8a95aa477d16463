"""The unmodified Iggy SDKs of PyPI in seven releases and five dialects, against one broker.

Each reads what all others wrote. ``make dev`` installs them beside the tests; ``POLYWIRE_INTEROP`` names another folder. Other SDKs run as
programs that print the same lines: ``POLYWIRE_IGGY_CRATE`` names one over the Rust crate 0.0.60, ``POLYWIRE_IGGY_RUST`` what cargo builds
of ``iggy_rust``, ``POLYWIRE_IGGY_JAVA`` is a class path with ``org.apache.iggy:iggy`` 0.8.0 and its dependencies. No available registry has
the SDKs for Node, Go and C# of these protocols.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.errors import Unavailable
from polywire.spark.java import find_java
from tests.three_brokers import Brokers, one_or_three, through

# The packages, and the first partition number of each.
CRATE: Final = "crate-iggy-0.0.60"  # the documented dialect itself, of August 2023
CRATE_VARIABLE: Final = "POLYWIRE_IGGY_CRATE"
RUST: Final = "crate-iggy-0.11.1-edge.9"  # protocol 0.12.2
RUST_VARIABLE: Final = "POLYWIRE_IGGY_RUST"
JAVA: Final = "java-iggy-0.8.0"
JAVA_VARIABLE: Final = "POLYWIRE_IGGY_JAVA"
SDKS: Final = {
    CRATE: 1,
    RUST: 0,
    JAVA: 0,
    "iggy-py-0.4.0": 1,
    "apache-iggy-0.5.0": 1,
    "apache-iggy-0.6.0": 0,
    "apache-iggy-0.7.0": 0,
    "apache-iggy-0.8.0": 0,
    "apache-iggy-0.9.0": 0,
    "apache-iggy-0.9.1.dev5": 0,
}
NEWEST: Final = "apache-iggy-0.9.1.dev5"
SHARED: Final = 240  # messages of a topic of twelve partitions
WITH_GROUPS: Final = tuple(name for name in SDKS if name != "iggy-py-0.4.0")
ADMINISTERED: Final = {
    "stream": "office",
    "partitions": 4,
    "messages": 1,
    "old name": None,
    "member": [0, 1, 2, 3],
    "groups": 0,
    "deleted": None,
    "stats": True,
}
COUNT: Final = 10_000
PEER: Final = Path(__file__).with_name("iggy_peer.py")
JAVA_PEER: Final = Path(__file__).parent / "iggy_java" / "IggyPeer.java"
ROOT: Final = Path(__file__).resolve().parents[2]
PEER_S_MAX: Final = 50


OPTIONS: Final = {"one process": (), "two processes": ("--processes", "2"), "any port": ("--any", "127.0.0.1:0")}


@pytest.fixture(scope="module", params=["one process"] if through() else OPTIONS)
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Serve one process, or two with topics in both. A port for any protocol detects that of its clients."""
    folder = tmp_path_factory.mktemp("iggy")
    wires = ("iggy",) if request.param == "two processes" else None
    with one_or_three(folder, *OPTIONS[request.param], wires=wires) as process:
        yield process


def address(broker: Brokers) -> tuple[str, int]:
    """Return the port for any protocol, if there is one."""
    return broker.addresses["any"] if "any" in broker.addresses else broker.addresses["iggy"]


def run(broker: Brokers, sdk: str, action: str, *streams: str) -> list[dict[str, object]]:
    """Return the results of one SDK, stream by stream."""
    command, environment = started(sdk, address(broker))
    return lines_of(broker, [*command, action, *streams], environment)


def started(sdk: str, at: tuple[str, int]) -> tuple[list[str], dict[str, str]]:
    """Return the command line of an SDK's driver, and its environment; skip if the SDK is missing."""
    host, port = at[0], str(at[1])
    environment = dict(os.environ)
    if sdk in (CRATE, RUST):
        return [_named(RUST_VARIABLE if sdk == RUST else CRATE_VARIABLE, sdk), f"{host}:{port}"], environment
    if sdk == JAVA:
        class_path = _named(JAVA_VARIABLE, sdk)
        try:
            java = str(find_java().home / "bin" / "java")
        except Unavailable as error:
            pytest.skip(f"the Iggy protocol was NOT tried with {sdk}: {error.message}")
        return [java, "-cp", class_path, str(JAVA_PEER), host, port], environment
    folder = Path(os.environ.get("POLYWIRE_INTEROP") or ROOT / ".venv" / "interop") / sdk
    if not folder.is_dir():
        pytest.skip(f"{sdk} is not installed: the Iggy protocol was NOT tried with it (make dev)")
    environment |= {"PYTHONPATH": str(folder), "IGGY_BASE": str(SDKS[sdk]), "IGGY_NAME": sdk}
    return [sys.executable, str(PEER), host, port], environment


def _named(variable: str, sdk: str) -> str:
    """Return the value of a variable; skip if it is empty."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: the Iggy protocol was NOT tried with {sdk}")
    return value


def lines_of(broker: Brokers, command: list[str], environment: dict[str, str]) -> list[dict[str, object]]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PEER_S_MAX, check=False)
    lines = done.stdout.splitlines()
    assert lines, f"{done.stderr}\n{broker.log_text()}"
    assert lines[-1] == "done", f"{done.stdout}\n{done.stderr}\n{broker.log_text()}"
    return [json.loads(line) for line in lines[:-1]]


def stream_of(sdk: str) -> str:
    return "s-" + sdk


@pytest.fixture(scope="module")
def written(broker: Brokers) -> dict[str, dict[str, object]]:
    """Let every available SDK write its stream."""
    results = {}
    for sdk in SDKS:
        try:
            results[sdk] = run(broker, sdk, "write", stream_of(sdk))[0]
        except pytest.skip.Exception:
            continue
    return results


@pytest.mark.parametrize("sdk", SDKS)
def test_writes(broker: Brokers, written: dict[str, dict[str, object]], sdk: str) -> None:
    if sdk not in written:
        pytest.skip(f"{sdk} is not there: the Iggy wire was NOT tried with it")
    assert written[sdk] == {"stream": stream_of(sdk), "topic": "paid", "messages": COUNT, "topics": 1}


@pytest.mark.parametrize("sdk", SDKS)
def test_each_sdk_reads_what_every_other_wrote(
    broker: Brokers, written: dict[str, dict[str, object]], sdk: str
) -> None:
    results = run(broker, sdk, "read", *map(stream_of, written))
    assert [result["read"] for result in results] == [COUNT] * len(written)


@pytest.mark.parametrize("sdk", SDKS)
def test_offsets_are_stored(broker: Brokers, written: dict[str, dict[str, object]], sdk: str) -> None:
    assert run(broker, sdk, "commit", stream_of(sdk))[0]["nexts"] == [0, 7, 14]


@pytest.mark.parametrize("sdk", WITH_GROUPS)
def test_consumer_groups(broker: Brokers, written: dict[str, dict[str, object]], sdk: str) -> None:
    result = run(broker, sdk, "group", stream_of(sdk))[0]
    assert (result["consumed"], result["stored"]) == (COUNT, True)


def test_the_rust_crate_holds_polls_and_repeats_safely(broker: Brokers) -> None:
    assert run(broker, RUST, "hold", "held")[0]["held"] == 1
    assert run(broker, RUST, "idempotent", "idempotent")[0]["messages"] == 10


def test_all_sdks_share_one_group(broker: Brokers) -> None:
    """Every SDK with groups is a member at once, and each message is delivered to one of them."""
    foreign = {RUST: RUST_VARIABLE, JAVA: JAVA_VARIABLE}
    members = [sdk for sdk in WITH_GROUPS if sdk != CRATE and (sdk not in foreign or os.environ.get(foreign[sdk]))]
    assert run(broker, NEWEST, "prepare", "shared")[0]["prepared"]
    with ExitStack() as stack:
        readers = []
        for sdk in members:
            command, environment = started(sdk, address(broker))
            words = [*command, "share", "shared"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(words, env=environment, **pipes))
            stack.callback(process.kill)
            readers.append((sdk, process))
        command, environment = started(NEWEST, address(broker))
        environment["IGGY_MEMBERS"] = str(len(members))
        wrote = lines_of(broker, [*command, "spread", "shared"], environment)[0]["wrote"]
        got: dict[str, list[str]] = {sdk: [] for sdk in members}
        with ThreadPoolExecutor(len(readers)) as pool:
            reading = [pool.submit(_read_share, process, got[sdk]) for sdk, process in readers]
            until = time.monotonic() + PEER_S_MAX
            while sum(map(len, got.values())) < SHARED and time.monotonic() < until:
                time.sleep(0.05)
            for _, process in readers:
                assert process.stdin is not None
                process.stdin.close()
            for task in reading:
                task.result(PEER_S_MAX)
    assert wrote == SHARED
    assert sorted(chain(*got.values())) == sorted(f"shared {number}" for number in range(SHARED)), broker.log_text()
    assert all(got.values()), "each member has partitions"


def _read_share(process: subprocess.Popen[str], got: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"got"'):
            got.append(json.loads(line)["got"])


def test_administration(broker: Brokers) -> None:
    assert run(broker, "apache-iggy-0.9.0", "admin", "office")[0] == {**ADMINISTERED, "options": 10, "purged": 0}


def test_administration_since_protocol_0_12(broker: Brokers) -> None:
    """Two more options, one less, and no purge."""
    assert run(broker, "apache-iggy-0.9.1.dev5", "admin", "office")[0] == {**ADMINISTERED, "options": 11}


@pytest.mark.parametrize("sdk", ["apache-iggy-0.9.0", "apache-iggy-0.9.1.dev5"])
def test_users(broker: Brokers, sdk: str) -> None:
    assert run(broker, sdk, "users", "office")[0] == {
        "stream": "office",
        "kept": True,
        "may not create": True,
        "may not read": True,
        "users": ["iggy"],
    }


@pytest.mark.parametrize("sdk", ["apache-iggy-0.5.0", "apache-iggy-0.9.0", "apache-iggy-0.9.1.dev5"])
def test_it_continues_while_another_broker_takes_over(tmp_path: Path, sdk: str) -> None:
    """Through a broker that is a standby, or leads by then."""
    with one_or_three(tmp_path, wires=["iggy", "polywire"], place=through() or "standby-1") as brokers:
        command, environment = started(sdk, brokers.addresses["iggy"])
        words = [*command, "endure", stream_of(sdk)]
        with subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                assert json.loads(process.stdout.readline()) == {"begun": True}
                brokers.kill()
                brokers.start()
                reported, _ = process.communicate(timeout=PEER_S_MAX)
            finally:
                process.kill()
        *lines, done = reported.splitlines()
        assert done == "done", brokers.log_text()
        assert [json.loads(line) for line in lines] == [{"stream": stream_of(sdk), "read": 2_000}]
