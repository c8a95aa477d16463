"""The project created by ``polywire pipeline init``, run by the real ``spark-pipelines`` command."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polywire.cli import main
from polywire.cli.usage import EXIT_DONE
from polywire.spark.java import find_java
from tests.e2e.conftest import Served, environment, fill
from tests.e2e.java import EVERY_JAVA, ONE_COMPILER, home_without_zip

RUN_TIMEOUT_S = 400.0  # about 20 s on an idle machine
COMMAND = Path(sys.executable).with_name("spark-pipelines")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(3 * RUN_TIMEOUT_S),
    pytest.mark.skipif(
        not COMMAND.exists() or any(importlib.util.find_spec(name) is None for name in ("grpc", "yaml", "zstandard")),
        reason="declarative pipelines were NOT tried: pyspark[pipelines] is not installed",
    ),
]


def run(project: Path) -> str:
    """Run the project as its README says, with default settings; return the output."""
    quiet = {name: value for name, value in environment().items() if name not in ("SPARK_CONF_DIR", "PYSPARK_PYTHON")}
    reported = {**quiet, "JAVA_HOME": str(find_java().home), "SPARK_CONF_DIR": "conf", "PYSPARK_PYTHON": sys.executable}
    reported[EVERY_JAVA] = (
        ONE_COMPILER  # the classes are not those of the archive, because the project has a directory conf
    )
    reported["SPARK_HOME"] = str(home_without_zip())
    path = os.pathsep.join([str(COMMAND.parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [COMMAND, "run"], cwd=project, env={**reported, "PATH": path}, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def records(served: Served, topic: str) -> int:
    return sum(part.next_offset - part.first_offset for part in served.connection.bounds([topic]))


def test_a_new_project_runs_and_resumes(served: Served, topic: str, tmp_path: Path) -> None:
    fill(served.connection, topic, [30, 12])
    project = tmp_path / "orders"
    assert main.run(["pipeline", "init", str(project), "--topic", topic, "--address", served.address]) == EXIT_DONE
    run(project)
    assert records(served, f"{topic}-copy") == 42
    fill(served.connection, topic, [5, 0])
    run(project)
    assert records(served, f"{topic}-copy") == 47
