"""What is shipped for operators names what there is: options of the command, and rights that the broker does not need."""

from __future__ import annotations

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
