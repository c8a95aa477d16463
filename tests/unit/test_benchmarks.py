"""How benchmarks are selected and judged; running them shows that they run."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import instructions
from benchmarks.__main__ import beginning
from benchmarks.instructions import Comparison, workloads
from benchmarks.peers import limits
from benchmarks.peers.iggy import Iggy
from benchmarks.peers.limits import EPOLL_ECHO
from benchmarks.peers.ours import PolywireIggy
from benchmarks.peers.peer import Absent
from benchmarks.peers.table import LIMIT, Row, cells
from benchmarks.peers.tansu import Tansu
from benchmarks.peers.workloads import Round
from benchmarks.queues.nats import NatsWorker
from benchmarks.queues.rabbitmq import RabbitWorker
from benchmarks.queues.workloads import prefetch_of
from polywire.protocols.iggy import vsr


def test_benchmarks_are_selected_by_prefix() -> None:
    parts = ("flux", "spark-read", "spark-write")
    assert beginning(parts, "spark") == ["spark-read", "spark-write"]
    assert beginning(parts, "spark-write") == ["spark-write"]
    assert beginning(parts, "") == list(parts)
    with pytest.raises(ValueError, match="no such part"):
        beginning(parts, "storm")


def test_each_load_has_a_unique_name_and_some_are_quick() -> None:
    names = [one.name for one in workloads()]
    assert len(names) == len(set(names))
    assert any(one.quick for one in workloads())


def test_more_instructions_are_detected_and_noise_is_not() -> None:
    assert Comparison("a", [100, 101, 102], [110, 111, 112]).is_worse(1.05)
    assert not Comparison("a", [100, 101, 108], [110, 111, 112]).is_worse(1.05)
    assert not Comparison("a", [100, 101, 102], [50, 51, 120]).is_worse(1.05)
    assert Comparison("a", [100, 100, 100], [110, 120, 130]).ratio == 1.2


def test_without_valgrind_nothing_is_counted_and_that_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["instructions", "--quick"])
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert instructions.main() == 0
    assert "NOTHING WAS COUNTED" in capsys.readouterr().err


def test_without_a_base_commit_nothing_is_counted_and_that_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["instructions", "--quick"])
    monkeypatch.setattr("shutil.which", str)
    monkeypatch.setattr(instructions, "commit_kept", str)  # as in a clone without history
    assert instructions.main() == 0
    assert "NOTHING WAS COUNTED" in capsys.readouterr().err


def test_a_result_is_stored_where_the_next_comparison_reads_it(tmp_path: Path) -> None:
    kept = tmp_path / f"today{instructions.RESULT}"
    instructions.show("f00", [Comparison("a", [2000, 2000], [1000, 1000])], kept)
    assert "| a | 2.0 | 1.0 | 0.500 | 0.0% |" in kept.read_text().splitlines()
    assert instructions.commit_kept() or not (instructions.HERE / ".git").exists()


def test_compiled_modules_are_reused_from_the_same_sources_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for tree in (here, there):
        (tree / "src").mkdir(parents=True)
        (tree / "setup.py").write_text("")
        (tree / "src" / "same.py").write_text("same")
        (tree / "src" / "other.py").write_text(str(tree))
    for name in ("same", "other"):
        (here / "src" / f"{name}.c").write_text("")
        (here / "src" / f"{name}.cpython-311.so").write_text("")
    monkeypatch.setattr(instructions, "HERE", here)
    instructions._take_over_modules(there)
    made = sorted(str(path.relative_to(there)) for path in there.rglob("*.[cs]*") if path.suffix in (".c", ".so"))
    assert made == ["build/lib/same.cpython-311.so", "src/same.c"]
    (here / "src" / "new.pxd").write_text("declared")  # of a module that the other tree does not have
    (there / "src" / "same.c").unlink()
    instructions._take_over_modules(there)
    assert (there / "src" / "same.c").exists()
    for tree in (here, there):
        (tree / "src" / "same.pxd").write_text(str(tree))
        (there / "src" / "same.c").unlink(missing_ok=True)
        instructions._take_over_modules(there)
        assert not (there / "src" / "same.c").exists()


def test_a_figure_is_compared_with_its_limit_and_peers_but_limits_are_not_peers() -> None:
    def rounds(*values: float) -> list[Round]:
        return [Round(value) for value in values]

    fast = Row("a", "records/s", True)
    fast.rounds = {"Polywire, x": rounds(50, 60, 70), "Other": rounds(30), f"{LIMIT}echo": rounds(100, 120, 140)}
    assert fast.ratio() == 2
    assert fast.to_limit("Polywire, x") == 0.5
    assert fast.to_limit("Other") == 0.25
    assert fast.to_limit(f"{LIMIT}echo") is None
    slow = Row("a", "us", False, {"Polywire, x": rounds(50), "Polywire, y": rounds(40), f"{LIMIT}echo": rounds(20)})
    assert slow.ratio() is None
    assert slow.to_limit("Polywire, x") == 0.4
    assert cells(fast, "Polywire, x")[-3:] == ("2.00", "0.50", "33%"), "rounds that differ so much are noise"
    assert cells(fast, "Other")[-3:] == ("", "0.25", "")


def test_a_relay_echoes_and_forwards_to_followers() -> None:
    with EPOLL_ECHO.running(Path()) as server:
        peer, follower = EPOLL_ECHO.follow(server.address, "t")
        with closing(peer), closing(EPOLL_ECHO.producer(server.address, "t")) as sender:
            time.sleep(0.1)
            for _ in range(2):
                sender.sendall(EPOLL_ECHO.request("t", [b"one", b"two"]))
                assert sender.recv(100) == b"one\ntwo\n"
                assert follower.take(memoryview(peer.recv(100))).records == 2
        with closing(EPOLL_ECHO.producer(server.address, "t")) as another:
            another.sendall(b"still there\n")
            assert another.recv(100) == b"still there\n"


def test_a_file_is_dropped_from_the_page_cache_and_copies_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("COPY_BYTES", 1 << 16), ("FILE_BYTES", 8 << 20), ("STREAM_BYTES", 4 << 20)):
        monkeypatch.setattr(limits, name, size)
    assert limits.copy_bytes_per_s() > 0
    assert limits.read_bytes_per_s(tmp_path) > 0
    assert limits.stream_bytes_per_s() > 0
    assert list(tmp_path.iterdir()) == []


def test_a_success_of_iggy_confirms_all_records_of_its_request() -> None:
    peer = PolywireIggy()
    assert peer.request("topic", [b"value"] * 3).count(b"value") == 3
    confirmed = peer.confirmations()
    assert [confirmed(memoryview(bytes(size))) for size in (7, 1, 16)] == [0, 3, 6]


def test_a_response_of_iggys_server_confirms_as_many_records_as_its_number() -> None:
    peer = Iggy()
    requests = [peer.request("topic", [b"value"] * count) for count in (3, 2)]
    assert [request.count(b"value") for request in requests] == [3, 2]
    head = vsr.parse_head(memoryview(requests[0]))
    assert (head.size, head.operation) == (len(requests[0]), vsr.SEND)
    replies = b"".join(vsr.reply_head(vsr.parse_head(memoryview(request)), 1, 4, 0) + bytes(4) for request in requests)
    confirmed = peer.confirmations()
    parts = (replies[:100], replies[100:258], replies[258:261], replies[261:])
    assert [confirmed(memoryview(part)) for part in parts] == [0, 0, 3, 2]
    for refusal in (vsr.reply_head(head, 1, 0, 2011), vsr.eviction(bytes(16), vsr.EVICT_NO_LOGIN)):
        with pytest.raises(AssertionError):
            peer.confirmations()(memoryview(refusal))


@pytest.mark.parametrize(
    ("peer", "source"), [(Iggy(), "get it from https://iggy.apache.org"), (Tansu(), "cargo install tansu")]
)
def test_a_peer_that_is_not_installed_names_its_source(
    peer: Iggy | Tansu, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Absent, match=source), peer.running(tmp_path):
        pass


def test_workers_of_a_queue_can_all_hold_records() -> None:
    assert [prefetch_of(workers) for workers in (1, 4, 10, 1_000, 5_000)] == [500, 500, 200, 2, 1]


def test_nats_workers_acknowledge_each_record_and_pull_more() -> None:
    worker = NatsWorker("t", b"in", 2, single=False)
    pull = worker.begin()
    data = b"MSG in 1 ack.1 3\r\none\r\nMSG in 1 ack.2 3\r\ntwo\r\n"
    step = worker.take(memoryview(data[:30]))
    assert step == (1, b"PUB ack.1 4\r\n+ACK\r\n")
    assert worker.take(memoryview(data[30:])) == (1, b"PUB ack.2 4\r\n+ACK\r\n" + pull)
    single = NatsWorker("t", b"in", 2, single=True)
    assert single.take(memoryview(data)) == (0, b"PUB ack.2 in.done 4\r\n+ACK\r\n")
    done = b"MSG in.done 2 0\r\n\r\n"
    assert single.take(memoryview(done)) == (1, b"PUB ack.1 in.done 4\r\n+ACK\r\n")
    assert single.take(memoryview(done)) == (1, pull)
    with pytest.raises(AssertionError):
        worker.take(memoryview(b"-ERR 'no'\r\n"))


def test_rabbitmq_workers_acknowledge_each_record() -> None:
    deliver = b"\0\x3c\0\x3c\x01c" + (7).to_bytes(8, "big") + b"\0\0\x01t"
    frames = b"".join(
        bytes([kind]) + b"\0\x01" + len(body).to_bytes(4, "big") + body + b"\xce"
        for kind, body in ((1, deliver), (2, b"head"), (3, b"value"))
    )
    worker = RabbitWorker("t")
    assert worker.take(memoryview(frames[:9])) == (0, b"")
    ack = b"\x01\0\x01\0\0\0\x0d\0\x3c\0\x50" + (7).to_bytes(8, "big") + b"\0\xce"
    assert worker.take(memoryview(frames[9:])) == (1, ack)
