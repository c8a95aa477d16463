"""What is shipped for operators names what there is: options of the command, rights that the broker does not need, what a release builds."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from polywire.cli.main import run
from polywire.cli.usage import EXIT_DONE
from polywire.server.config import ServeConfig
from polywire.server.lifecycle import EXIT_STORAGE
from polywire.server.users import add_user

ROOT: Final = Path(__file__).parents[1]
UNIT: Final = (ROOT / "deploy" / "systemd" / "polywire.service").read_text("utf-8").replace("\\\n", " ")
APART: Final = ("POLYWIRE_SERVE_NODE", "POLYWIRE_SERVE_ADVERTISE")
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


def kubernetes(name: str = "polywire") -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / f"{name}.yaml").read_text("utf-8"))


def container() -> dict[str, Any]:
    [stateful] = [entry for entry in kubernetes() if entry["kind"] == "StatefulSet"]
    found: dict[str, Any] = stateful["spec"]["template"]["spec"]["containers"][0]
    return found


def services() -> dict[str, dict[str, Any]]:
    """Of three brokers on a bucket."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(
        (ROOT / "deploy" / "container" / "cluster.yaml").read_text("utf-8")
    )["services"]
    return found


def deployment() -> dict[str, Any]:
    """Of three brokers on a bucket."""
    [found] = [entry for entry in kubernetes("cluster") if entry["kind"] == "Deployment"]
    return dict(found["spec"])


def pod() -> dict[str, Any]:
    found: dict[str, Any] = deployment()["template"]["spec"]
    return found


def of_a_pod() -> dict[str, str]:
    """What a pod's environment would be."""
    fields = {"metadata.name": "polywire-7d4f9c-x2x1", "status.podIP": "10.1.2.3"}
    return {
        entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in pod()["containers"][0]["env"]
    }


@pytest.mark.parametrize(
    "given",
    [of_compose(), of_kubernetes(), services()["broker-2"]["environment"], of_a_pod()],
    ids=["compose", "kubernetes", "compose of three", "kubernetes of three"],
)
def test_a_broker_would_start_with_the_settings_of_the_containers(
    given: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / "users"
    add_user(users, "admin", "a password", "")
    settings = of_the_image() | dict(given) | {"POLYWIRE_SERVE_USERS": str(users)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
        assert (
            name.startswith("AWS_") or f"`--{name.removeprefix('POLYWIRE_SERVE_').lower().replace('_', '-')}" in OPTIONS
        )
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


def test_brokers_of_one_bucket_are_told_apart_and_reached() -> None:
    brokers = {name: service["environment"] for name, service in services().items() if name.startswith("broker-")}
    assert len(brokers) == 3
    for name, settings in brokers.items():
        assert settings["POLYWIRE_SERVE_NODE"] == settings["POLYWIRE_SERVE_ADVERTISE"] == name
    common = [{key: settings[key] for key in settings if key not in APART} for settings in brokers.values()]
    assert common[0] == common[1] == common[2]
    host, _, port = common[0]["AWS_ENDPOINT_URL"].removeprefix("http://").partition(":")
    assert f":{port}" in services()[host]["command"]
    bucket = common[0]["POLYWIRE_SERVE_BUCKET"].removeprefix("s3://").partition("/")[0]
    assert services()["bucket"]["command"][-1] == f"{services()[host]['command'][-1]}/{bucket}"
    ports = [port for name in brokers for port in services()[name]["ports"]]
    assert len({port.rpartition(":")[0] for port in ports}) == len(ports) == 3


def test_a_pod_is_told_apart_by_its_name_and_sent_to_when_it_is_ready() -> None:
    [broker] = pod()["containers"]
    assert of_a_pod()["POLYWIRE_SERVE_NODE"] == "polywire-7d4f9c-x2x1"
    assert of_a_pod()["POLYWIRE_SERVE_ADVERTISE"] == "10.1.2.3"
    assert deployment()["replicas"] == 3
    assert not [volume for volume in pod()["volumes"] if "persistentVolumeClaim" in volume], "the bucket has everything"
    assert broker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert broker["livenessProbe"]["httpGet"] == broker["startupProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    listens = {port["name"]: port["containerPort"] for port in broker["ports"]}
    kinds = {entry["kind"]: entry for entry in kubernetes("cluster")}
    assert {port["name"]: port["port"] for port in kinds["Service"]["spec"]["ports"]} == listens
    for name, port in listens.items():
        assert of_a_pod()[f"POLYWIRE_SERVE_{name.upper()}"] == f"0.0.0.0:{port}"
    labels = deployment()["template"]["metadata"]["labels"]
    budget = kinds["PodDisruptionBudget"]["spec"]
    assert budget == {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    assert kinds["Service"]["spec"]["selector"] == deployment()["selector"]["matchLabels"] == labels
    [*_, command] = broker["lifecycle"]["preStop"]["exec"]["command"]
    drain, waits = (shlex.split(one) for one in command.split(";"))
    assert drain[:3] == ["polywire", "cluster", "drain"]
    assert [word.strip("$") in of_a_pod() for word in drain[3:5]] == [True, True]
    seconds = float(drain[drain.index("--timeout-s") + 1]) + float(waits[1])
    assert seconds + ServeConfig().drain_timeout_s < pod()["terminationGracePeriodSeconds"]
    gib = float(of_a_pod()["POLYWIRE_SERVE_CACHE_GIB"])
    [cache] = [volume["emptyDir"]["sizeLimit"] for volume in pod()["volumes"] if volume["name"] == "cache"]
    assert gib < float(cache.removesuffix("Gi")), "and the journal's slots"


def test_the_image_can_reach_a_bucket() -> None:
    assert ".whl)[bucket]" in (ROOT / "deploy" / "container" / "Dockerfile").read_text("utf-8")


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
