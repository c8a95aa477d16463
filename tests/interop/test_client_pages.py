"""Run the programs on the pages for other clients, unmodified, with the clients that are installed.

Tools are named by the variables of ``kafka_peer.py``. A page whose tools are missing is skipped with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import polywire
from polywire.testing import RunningBroker, broker
from tests.e2e.followed_page import Page, matches, read_page
from tests.installed_clients import installed

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ROOT / "docs" / "develop"
SECONDS_MAX: Final = 120
IGGY: Final = "apache-iggy-0.9.0"
FRAMEWORKS: Final = {
    "dagster": "dagster-1.13.29",
    "dlt": "dlt-1.31.0",
    "faststream": "faststream-0.7.8",
    "quix-streams": "quixstreams-3.28.1",
}
# Frameworks write below the home directory and report usage unless they are configured.
PRIVATE: Final = {"DAGSTER_DISABLE_TELEMETRY": "yes", "DLT_DATA_DIR": "dlt", "RUNTIME__DLTHUB_TELEMETRY": "false"}


def programs() -> dict[str, str]:
    """Return the text around each program: a section of a page, by its heading, or the beginning of a page, by its name."""
    found = {}
    for page in sorted((PAGES / "clients").glob("*.md")):
        first, *sections = page.read_text("utf-8").split("\n## ")
        for heading, text in [(page.stem, first), *(section.split("\n", 1) for section in sections)]:
            if read_page(text).files:
                found[heading.lower().replace(" ", "-")] = text
    return found


PROGRAMS: Final = programs()


@pytest.fixture
def running() -> Iterator[RunningBroker]:
    with broker() as process:
        yield process


def saved(page: Page, folder: Path, running: RunningBroker) -> Path:
    """Save the program of a page with the ports of a broker, and return its path."""
    [(name, text)] = page.files.items()
    for port, protocol in (("9094", "kafka"), ("8090", "iggy"), ("9555", "polywire")):
        text = text.replace(f"127.0.0.1:{port}", "{}:{}".format(*running.addresses[protocol]))
    (folder / name).write_text(text, "utf-8")
    return folder / name


def expected(text: str) -> str:
    """Return the output that a page or section shows: its only block of text."""
    return text.partition("```text\n")[2].partition("```\n")[0]


def run(
    command: list[str], *, folder: Path, codes: tuple[int, ...] = (0,), environment: dict[str, str] | None = None
) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def variable(name: str) -> str:
    return os.environ.get(name) or pytest.skip(f"{name} is not set: the page was NOT followed")


def tool(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"{name} is missing: the page was NOT followed")


def run_airflow(program: Path) -> str:
    """Run a DAG with an interpreter that has Airflow and Polywire."""
    airflow, folder = [variable("POLYWIRE_AIRFLOW"), "-m", "airflow"], program.parent
    settings = {
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__DAGS_FOLDER": str(folder),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
    }
    [address] = re.findall(r'BROKER = "(.+)"', program.read_text("utf-8"))
    with polywire.connect_sync(address) as client:
        for price in (12, 30):
            client.send_json("orders", {"customer": "alice", "price": price}, partition=0)
    for words in (["db", "migrate"], ["dags", "reserialize"]):
        run([*airflow, *words], folder=folder, environment=settings)
    return run([*airflow, "dags", "test", program.stem], folder=folder, environment=settings)


def printed_by(name: str, program: Path) -> str:
    """Build and run a program with the tools of its page."""
    folder = program.parent
    match name:
        case "java":
            path = variable("POLYWIRE_KAFKA_JAVA")
            run([tool("javac"), "-cp", path, program.name], folder=folder)
            return run([tool("java"), "-cp", f"{path}{os.pathsep}.", program.stem], folder=folder)
        case "librdkafka":
            return run([variable("POLYWIRE_KAFKA_CLIENTS"), program.name], folder=folder)
        case "kafkajs":
            return run(
                [tool("node"), program.name], folder=folder, environment={"NODE_PATH": variable("POLYWIRE_KAFKA_NODE")}
            )
        case "franz-go":
            module = Path(variable("POLYWIRE_KAFKA_GO"))
            for file in ("go.mod", "go.sum"):
                shutil.copy(module / file, folder)
            return run([tool("go"), "run", "-mod=mod", program.name], folder=folder)
        case "dataframes":
            return run([sys.executable, program.name], folder=folder)
        case "iggy":
            return run(
                [sys.executable, program.name],
                folder=folder,
                codes=(0, -6),
                environment={"PYTHONPATH": installed(IGGY)},
            )
        case "airflow":
            return run_airflow(program)
        case "dagster" | "dlt" | "faststream" | "quix-streams":
            environment = PRIVATE | {"HOME": str(folder), "PYTHONPATH": installed(FRAMEWORKS[name])}
            return run([sys.executable, program.name], folder=folder, environment=environment)
        case _:
            raise AssertionError(f"no way to run the page {name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_of_a_client_page_runs(name: str, running: RunningBroker, tmp_path: Path) -> None:
    text = PROGRAMS[name]
    program = saved(read_page(text), tmp_path, running)
    assert matches(printed_by(name, program), expected(text))


def test_every_way_to_run_a_program_has_one() -> None:
    assert {*FRAMEWORKS, "airflow", "dataframes", "franz-go", "iggy", "java", "kafkajs", "librdkafka"} == {*PROGRAMS}


@pytest.mark.slow
def test_each_order_has_one_invoice_after_a_crash(running: RunningBroker, tmp_path: Path) -> None:
    interpreter = variable("POLYWIRE_KAFKA_CLIENTS")
    text = (PAGES / "recipes" / "exactly-once.md").read_text("utf-8").partition("\n## With a Kafka client\n")[2]
    program = saved(read_page(text), tmp_path, running)
    with polywire.connect_sync(running.url()) as client:
        with client.producer() as producer:
            producer.send_many("orders", [str(number) for number in range(100)])
        run([interpreter, program.name, "crash"], folder=tmp_path, codes=(3,))
        run([interpreter, program.name], folder=tmp_path)
        invoices = []
        with client.consumer("invoices") as consumer:
            while records := consumer.batch(timeout_s=2):
                invoices += [record.text for record in records]
    assert sorted(invoices) == sorted(f"pay for {number}" for number in range(100))
    assert expected(text).strip() == str(len(invoices))
