"""What is shipped for operators names what there is: options of the command, rights that the broker does not need, what a release builds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import pytest

from polywire.server.lifecycle import EXIT_STORAGE

ROOT: Final = Path(__file__).parents[1]
UNIT: Final = (ROOT / "deploy" / "systemd" / "polywire.service").read_text("utf-8").replace("\\\n", " ")
OPTIONS: Final = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")


def values(name: str) -> list[str]:
    return [line.partition("=")[2] for line in UNIT.splitlines() if line.startswith(f"{name}=")]


def test_the_unit_starts_the_command_as_it_is() -> None:
    (command,) = values("ExecStart")
    words = command.split()
    assert words[1] == "serve"
    assert not [word for word in words if word.startswith("--") and f"`{word}" not in OPTIONS]
    assert values("RestartPreventExitStatus") == [str(EXIT_STORAGE)]
    assert values("ExecReload") == ["/bin/kill -HUP $MAINPID"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CapabilityBoundingSet", ""),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("StateDirectoryMode", "0700"),
        ("UMask", "0077"),
        ("MemoryDenyWriteExecute", "yes"),
    ],
)
def test_the_unit_gives_no_right_that_is_not_needed(name: str, value: str) -> None:
    assert values(name) == [value]


def test_a_release_builds_for_every_python_and_tries_each_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    classifiers = project["project"]["classifiers"]
    pythons = {words[-1] for words in (name.split(" :: ") for name in classifiers) if "." in words[-1]}
    wheels = project["tool"]["cibuildwheel"]
    assert set(wheels["build"].split()) == {f"cp{python.replace('.', '')}-*" for python in pythons}
    assert wheels["test-command"] == "python -I {project}/tools/installed.py --compiled"
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    assert "installed.py --pure" in workflow, "the source distribution is tried, too"
    assert (ROOT / "tools" / "installed.py").exists()
