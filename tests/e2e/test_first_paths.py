"""The first steps of each kind of user, in a new environment.

They run exactly the commands of their pages. The README's quickstart starts with a checkout, all other pages with an
installed wheel. ``POLYWIRE_HOGS=3`` keeps the processors busy meanwhile, which makes all other tests slower, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.conftest import Followed
from tests.e2e.followed_page import ROOT, differences, follow, path_of
from tests.e2e.installation import WITH_KAFKA_CLIENT, copy_checkout
from tests.installed_clients import installed

FIRST_SPARK_PAGES: Final = ("get-started/spark", "spark/dead-letters")  # PySpark engineers
FIRST_PAGES: Final = (
    "get-started/application",  # application developers
    "migrate/kafka",  # users of Kafka
    "get-started/operator",
    "get-started/tests",
    "get-started/quickstart",
)
WITH_KAFKA_CLIENT_PAGES: Final = ("migrate/kafka",)
HOGS: Final = int(os.environ.get("POLYWIRE_HOGS", "0"))
DONE: Final = (".made", ".base", ".built", ".installed", ".demo")  # what make would download and compile
SPARK_STEP: Final = "```sh\nmake spark\n"
END_OF_BLOCK: Final = "\n```\n"
SHOWN: Final = """\
+---+-----+
|key|value|
+---+-----+
|  a|hello|
+---+-----+
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", autouse=True)
def busy_machine() -> Iterator[None]:
    """Run other programs that would use all processors, if the environment asks for them."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(HOGS)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.spark) for name in FIRST_SPARK_PAGES), *FIRST_PAGES]
)
def test_first_steps(name: str, followed: Followed) -> None:
    if name in WITH_KAFKA_CLIENT_PAGES:
        installed(WITH_KAFKA_CLIENT)
    assert differences(path_of(name), followed[name].result()) == []


def follow_readme(python: Path, tmp_path: Path, *, with_spark: bool) -> list[str]:
    """Follow the README's quickstart on a fresh checkout; return the output of each block."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    copy_checkout(folder)
    (folder / ".venv").symlink_to(python.parents[1])
    for name in DONE:
        (folder / ".venv" / name).touch()
        time.sleep(0.01)  # each depends on those before it
    readme = (ROOT / "README.md").read_text("utf-8")
    text = readme[readme.index("## Quickstart") : readme.index("## See it work")]
    if not with_spark:
        start = text.index(SPARK_STEP)
        text = text[:start] + text[text.index(END_OF_BLOCK, start) + len(END_OF_BLOCK) :]
    page = tmp_path / "README.md"
    page.write_text(text, "utf-8")
    return [printed for _, printed in follow(page, python, folder)]


def test_the_readme(python: Path, tmp_path: Path) -> None:
    setup, first, query = follow_readme(python, tmp_path, with_spark=False)
    assert setup.startswith("polywire 0.1.0 (")
    *sample, produced, record = first.splitlines()
    assert [json.loads(line)["topic"] for line in sample] == ["sample"] * 3
    assert produced == "produced topic=orders records=1"
    assert '"key": "a", "value": "hello"' in record
    assert "│ a       │       1 │" in query


@pytest.mark.spark
def test_the_readme_with_spark(python: Path, tmp_path: Path) -> None:
    *_, spark = follow_readme(python, tmp_path, with_spark=True)
    assert SHOWN in spark
    assert "Traceback" not in spark
