"""Records and offsets of a program that ends without closing its clients, or with an exception."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

import pytest

import polywire
from polywire.client.sync import EXIT_S
from polywire.errors import Missing
from tests.unit.client.served import Served

BEGINNING = """
import asyncio, os, sys
import polywire
from polywire.client import sync
"""
TIMEOUT_S = 60.0
COUNT = 100


QUIET: Final = ("-W", "ignore::DeprecationWarning")  # Python 3.12 and newer warn of forks of processes with threads


def start(served: Served, program: str) -> subprocess.Popen[str]:
    text = BEGINNING + textwrap.dedent(program)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *QUIET, "-c", text, served.address], text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def stored(served: Served) -> int:
    with polywire.connect_sync(served.address) as client:
        return sum(part.next_offset for part in client.bounds("t"))


@pytest.mark.parametrize(
    ("ending", "status", "printed"), [("", 0, ""), ("raise ValueError", 1, "ValueError\n"), ("sys.exit(3)", 3, "")]
)
def test_records_are_stored_at_the_end_of_a_program(served: Served, ending: str, status: int, printed: str) -> None:
    program = start(
        served,
        f"""
        def run():
            producer = polywire.connect_sync(sys.argv[1]).producer(linger_ms=1000)
            for number in range({COUNT}):
                producer.send("t", str(number))
            {ending}
        run()
        """,
    )
    _, errors = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == status
    assert errors.endswith(printed)
    assert ("Traceback" in errors) == bool(printed)
    assert "Task" not in errors
    assert stored(served) == COUNT


def test_the_end_of_a_program_waits_for_a_limited_time(served: Served) -> None:
    program = start(
        served,
        f"""
        sync.EXIT_S = {EXIT_S / 100}
        producer = polywire.connect_sync(sys.argv[1]).producer()
        producer.send_and_wait("t", "stored")
        print("stored", flush=True)
        input()
        for number in range({COUNT}):
            producer.send("t", str(number))
        """,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "stored\n"
    served.stop_listening()
    served.drop_connections()
    _, errors = program.communicate("\n", timeout=TIMEOUT_S)
    assert program.returncode == 0
    assert "a client could not be closed in time" in errors
    assert f"they were acknowledged (Producer.close waits for them) records={COUNT}\n" in errors
    assert errors.count("records=") == 1
    served.listen_again()
    assert stored(served) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_end_of_a_fork_does_not_wait(served: Served) -> None:
    program = start(
        served,
        """
        sync.EXIT_S = 1e6
        producer = polywire.connect_sync(sys.argv[1]).producer()
        producer.send_and_wait("t", "from the parent")
        if os.fork():
            os.wait()
        """,
    )
    assert program.communicate(timeout=TIMEOUT_S) == ("", "")
    assert program.returncode == 0
    assert stored(served) == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_records_are_stored_at_the_end_of_a_worker(served: Served, tmp_path: Path, method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import multiprocessing, sys
        import polywire

        def work(address):
            producer = polywire.connect_sync(address).producer(linger_ms=1000)
            for number in range({COUNT}):
                producer.send("t", str(number))

        if __name__ == "__main__":
            worker = multiprocessing.get_context("{method}").Process(target=work, args=(sys.argv[1],))
            worker.start()
            worker.join()
            sys.exit(worker.exitcode)
        """)
    )
    subprocess.run([sys.executable, program, served.address], check=True, timeout=TIMEOUT_S)
    assert stored(served) == COUNT


def test_records_are_stored_after_an_exception_in_the_block_of_a_producer(served: Served) -> None:
    def run_blocking() -> None:
        with polywire.connect_sync(served.address) as client, client.producer(linger_ms=100_000) as producer:
            producer.send_many("t", ["a"] * COUNT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_blocking()
    assert stored(served) == COUNT

    async def run() -> None:
        async with polywire.connect(served.address) as client, client.producer(linger_ms=100_000) as producer:
            await producer.send_many("t", ["b"] * COUNT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())
    assert stored(served) == 2 * COUNT


def test_a_warning_says_what_an_event_loop_has_not_sent(served: Served) -> None:
    program = start(
        served,
        f"""
        async def run():
            producer = (await polywire.connect(sys.argv[1])).producer(linger_ms=1000)
            for number in range({COUNT}):
                await producer.send("t", str(number), partition=0)
        asyncio.run(run())
        """,
    )
    _, errors = program.communicate(timeout=TIMEOUT_S)
    assert program.returncode == 0
    assert errors == (
        "records may not be stored, because their producer ended before they were acknowledged"
        f" (Producer.close waits for them) records={COUNT}\n"
    )


def test_an_exception_does_not_commit_the_last_record(served: Served) -> None:
    def fail_on_the_second() -> None:
        with polywire.connect_sync(served.address) as client:
            consumer = client.consumer("t", group="blocking")
            assert [next(consumer).text for _ in range(2)] == ["a", "b"]
            raise ValueError

    async def fail_asynchronously() -> None:
        async with polywire.connect(served.address) as client:
            consumer = client.consumer("t", group="asynchronous")
            assert [(await anext(consumer)).text for _ in range(2)] == ["a", "b"]
            raise ValueError

    with polywire.connect_sync(served.address) as client:
        with client.producer() as producer:
            producer.send_many("t", ["a", "b"], partition=0)
        with pytest.raises(ValueError):
            fail_on_the_second()
        with pytest.raises(ValueError):
            asyncio.run(fail_asynchronously())
        assert client.position("blocking", "t", 0) == 1
        assert client.position("asynchronous", "t", 0) == 1


def test_one_error_does_not_keep_others_from_being_closed(served: Served) -> None:
    with polywire.connect_sync(served.address) as other:
        other.create_topic("t", 1)
        other.create_topic("deleted", 1)
        other.send("t", "a")
        client = polywire.connect_sync(served.address)
        assert next(client.consumer("t", group="g", commit_interval_s=3600)).text == "a"
        client.producer(linger_ms=3_600_000, create=False).send("deleted", "b")
        other.delete_topic("deleted")
        with pytest.raises(Missing):
            client.close()
        assert other.position("g", "t", 0) == 1
        assert not [group for group in other.groups() if group.members]


def test_a_client_is_closed_while_an_event_loop_runs(served: Served) -> None:
    program = start(
        served,
        """
        async def run():
            asyncio.get_running_loop().slow_callback_duration = 1e6  # it reports this task otherwise
            with polywire.connect_sync(sys.argv[1]) as client:
                client.producer().send("t", "a")
        asyncio.run(run(), debug=True)
        """,
    )
    assert program.communicate(timeout=TIMEOUT_S) == ("", "")
    assert stored(served) == 1
