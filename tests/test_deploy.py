"""What is shipped for operators names what there is: options of the command, rights that the broker does not need, what a release builds."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from polywire.cli.main import run
from polywire.cli.usage import EXIT_DONE
from polywire.server.lifecycle import EXIT_STORAGE
from polywire.server.users import add_user

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


def of_the_image() -> dict[str, str]:
    return dict(re.findall(r"(POLYWIRE_\w+)=(\S+)", (ROOT / "deploy" / "container" / "Dockerfile").read_text("utf-8")))


def of_compose() -> dict[str, str]:
    compose = yaml.safe_load((ROOT / "deploy" / "container" / "compose.yaml").read_text("utf-8"))
    found: dict[str, str] = compose["services"]["polywire"]["environment"]
    return found


def of_kubernetes() -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container()["env"]}


def kubernetes() -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "polywire.yaml").read_text("utf-8"))


def container() -> dict[str, Any]:
    [stateful] = [entry for entry in kubernetes() if entry["kind"] == "StatefulSet"]
    found: dict[str, Any] = stateful["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("given", [of_compose(), of_kubernetes()], ids=["compose", "kubernetes"])
def test_a_broker_would_start_with_the_settings_of_the_containers(
    given: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / "users"
    add_user(users, "admin", "a password", "")
    settings = of_the_image() | dict(given) | {"POLYWIRE_SERVE_USERS": str(users)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
        assert f"`--{name.removeprefix('POLYWIRE_SERVE_').lower().replace('_', '-')}" in OPTIONS
    monkeypatch.chdir(tmp_path)
    assert run(["config", "check"]) == EXIT_DONE
    told = capsys.readouterr().err
    for wire in ("polywire on 0.0.0.0:9555", "kafka on 0.0.0.0:9094", "iggy on 0.0.0.0:8090", "cursus on 0.0.0.0:9000"):
        assert wire in told


def test_what_kubernetes_reaches_is_what_the_broker_listens_on() -> None:
    [service] = [entry for entry in kubernetes() if entry["kind"] == "Service"]
    reached = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert reached == {port["name"]: port["containerPort"] for port in container()["ports"]}
    addresses = {name: f"0.0.0.0:{port}" for name, port in reached.items()}
    assert (
        addresses.items()
        <= {name.removeprefix("POLYWIRE_SERVE_").lower(): value for name, value in of_kubernetes().items()}.items()
    )


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
