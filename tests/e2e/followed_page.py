"""Follows a page of the documentation as a reader would: runs every command and compares every output.

One shell runs all blocks marked `sh`, from the page's beginning to its end. A block marked with a language and
`title="name"` is saved under that name. A block marked `text` after commands is their expected output, where `…` stands
for any text and a line `…` for any lines. Other blocks are ignored.

The environment is that of a new user: a home directory of its own and no variables of this process. The ports of the page
are replaced by free ones, and `pip` only checks that what the page installs is there. `polywire dev` runs in the background,
because the reader continues in another terminal.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polywire.testing.process import lasting_port
from tests.e2e.java import EVERY_JAVA, short_lived

ROOT: Final = Path(__file__).parents[2]
BLOCK: Final = re.compile(r"^```(?P<kind>\w+)(?: title=\"(?P<title>[\w./-]+)\")?\n(?P<text>.*?)^```$", re.M | re.S)
# The listeners of `polywire serve`, by the ports in the pages.
PORTS: Final = {
    "9000": "CURSUS",
    "9092": "FLUX",
    "8090": "IGGY",
    "9093": "KAFKA07",
    "9094": "KAFKA",
    "9555": "POLYWIRE",
    "9080": "HTTP",
}
OLD_PORTS: Final = ("18090", "19000", "19092", "19093", "19094")  # of the broker in the migration page
WITHOUT_LOGIN: Final = ("FLUX", "KAFKA07")  # protocols that are off on brokers with users unless configured
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of a new user
PAGE_SECONDS_MAX: Final = (
    1500  # several pages are followed at the same time, also while other programs use all processors
)
PROGRESS: Final = re.compile(r".+ … seconds=\d|waiting for a broker ")  # also printed on a slow machine
END_OF_BLOCK: Final = "=== end of block "
ANYTHING: Final = "…"
DEV: Final = re.compile(r"polywire dev$", re.M)
DEV_IN_BACKGROUND: Final = (
    "polywire dev > dev.log 2>&1 &\nuntil grep -q ^ready dev.log; do kill -0 $! && sleep 0.1; done"
)

SPARK_SETTINGS: Final = (
    "--conf spark.python.authenticate.socketTimeout=120s pyspark-shell"  # a busy machine starts workers slowly
)

PIP: Final = """\
#!/bin/sh
exec python - "$@" <<'END'
import importlib.metadata as metadata, re, sys
for word in sys.argv[2:]:
    name, _, extras = word.rstrip("]").removeprefix("../").partition("[")
    metadata.version(name)
    for extra in filter(None, extras.split(",")):
        for wanted in metadata.requires(name):
            if f'extra == "{extra}"' in wanted.replace("'", '"'):
                metadata.version(re.match("[A-Za-z0-9._-]+", wanted)[0])
END
"""


PRELUDE: Final = """\
set -euo pipefail
trap 'kill $(jobs -p) $(cat ./*.pid) 2>/dev/null || true' EXIT
"""


@dataclass(frozen=True, slots=True)
class Step:
    """Commands of a page, and their expected output; None if the page shows none."""

    commands: str
    printed: str | None
    line: int


@dataclass(frozen=True, slots=True)
class Page:
    """The files to save and the commands to run of a page, in order."""

    files: dict[str, str]
    steps: list[Step]


def path_of(name: str) -> Path:
    """Return the path of a page by its name in the documentation."""
    return ROOT / "docs" / f"{name}.md"


def read_page(text: str) -> Page:
    """Return the files and commands of a page."""
    files: dict[str, str] = {}
    steps: list[Step] = []
    expects = False
    for block in BLOCK.finditer(text):
        if block["title"]:
            files[block["title"]] = block["text"]
        elif block["kind"] == "sh":
            steps.append(Step(block["text"], None, text.count("\n", 0, block.start()) + 1))
        elif block["kind"] == "text" and expects:
            steps[-1] = Step(steps[-1].commands, block["text"], steps[-1].line)
        expects = block["kind"] == "sh"
    return Page(files, steps)


def matches(printed: str, expected: str) -> bool:
    """Return whether the output matches the page, ignoring spaces within a line."""
    pattern = ""
    for line in expected.splitlines():
        if line.strip() == ANYTHING:
            pattern += r"(?:.*\n)*?"
        else:
            words = [
                ".*".join(re.escape(part) for part in re.sub(r"\s+", " ", word).split(ANYTHING))
                for word in [line.strip()]
            ]
            pattern += words[0] + r"\n"
    plain = "".join(re.sub(r"\s+", " ", line.strip()) + "\n" for line in printed.splitlines())
    return re.fullmatch(pattern, plain) is not None


def differences(path: Path, steps: Sequence[tuple[Step, str]]) -> list[str]:
    """Return how the output of a page's commands differs from the page."""
    return [
        f"{path.name}:{step.line} printed {printed!r}, not {step.printed!r}"
        for step, printed in steps
        if step.printed is not None and not matches(printed, step.printed)
    ]


def follow(path: Path, python: Path, folder: Path) -> Iterator[tuple[Step, str]]:
    """Follow a page in an empty folder with an environment's commands; return each step and its output.

    Raises AssertionError with the whole output if the page's commands fail.
    """
    named = (*PORTS, *OLD_PORTS)
    given = {port: str(lasting_port()) for port in named}

    def here(text: str) -> str:
        text = DEV.sub(DEV_IN_BACKGROUND, text)
        return re.sub(r"\b(?:" + "|".join(given) + r")\b", lambda match: given[match[0]], text)

    page = read_page(path.read_text("utf-8"))
    for name, text in page.files.items():
        (folder / name).write_text(here(text), "utf-8")
    commands = folder.parent / f"{folder.name}-commands"
    commands.mkdir()
    (commands / "pip").write_text(PIP)
    (commands / "pip").chmod(0o755)
    script = "".join(f"{here(step.commands)}echo '{END_OF_BLOCK}{step.line}'\n" for step in page.steps)
    has_users = "polywire user add" in script
    environment = {
        f"POLYWIRE_SERVE_{wire}": f"127.0.0.1:{given[port]}"
        for port, wire in PORTS.items()
        if not (has_users and wire in WITHOUT_LOGIN)
    }
    environment |= {
        "PATH": os.pathsep.join([str(commands), str(python.parent), SYSTEM_PATH]),
        "POLYWIRE_ADDRESS": f"polywire://127.0.0.1:{given['9555']}",
        "POLYWIRE_HTTP": f"http://127.0.0.1:{given['9080']}",
        "HOME": str(folder),
        "TMPDIR": tempfile.gettempdir(),
        "LANG": "C.UTF-8",
        "COLUMNS": "200",
        EVERY_JAVA: short_lived(),
        "PYSPARK_SUBMIT_ARGS": SPARK_SETTINGS,
    }
    done = subprocess.run(
        ["bash", "-c", PRELUDE + script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PAGE_SECONDS_MAX,
        check=False,
    )
    said = {path.name: path.read_text("utf-8", "replace")[-2000:] for path in folder.glob("*.log")}
    assert done.returncode == 0, f"{path.name} cannot be followed: {done.stdout}\n{said}"
    rest = done.stdout
    rest = "".join(line for line in rest.splitlines(keepends=True) if not PROGRESS.match(line))
    for step in page.steps:
        printed, _, rest = rest.partition(f"{END_OF_BLOCK}{step.line}\n")
        yield step, printed
