"""Deployment files match the program: command options, minimal privileges, and the contents of a release."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from polywire.build_info import VERSION
from polywire.cli.main import run
from polywire.cli.usage import EXIT_DONE
from polywire.server.config import ServeConfig
from polywire.server.lifecycle import EXIT_STORAGE
from polywire.server.users import add_user
from tests.certificates import Certificates

ROOT: Final = Path(__file__).parents[1]
UNIT: Final = (ROOT / "deploy" / "systemd" / "polywire.service").read_text("utf-8").replace("\\\n", " ")
CONTAINER: Final = ROOT / "deploy" / "container"
KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
MANIFESTS: Final = tuple(KUBERNETES / f"{name}.yaml" for name in ("polywire", "cluster", "versitygw"))
APART: Final = ("POLYWIRE_SERVE_NODE", "POLYWIRE_SERVE_ADVERTISE", "POLYWIRE_SERVE_KAFKA_ADVERTISE")
GIVEN: Final = {"POLYWIRE_BUCKET_SECRET": "secret"}
"""Variables that a user sets for the compose files."""
OPTIONS: Final = (ROOT / "docs" / "reference" / "configuration.md").read_text("utf-8")


def values(name: str) -> list[str]:
    return [line.partition("=")[2] for line in UNIT.splitlines() if line.startswith(f"{name}=")]


def test_the_unit_starts_the_current_command() -> None:
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
def test_the_unit_grants_no_unneeded_privilege(name: str, value: str) -> None:
    assert values(name) == [value]


def of_the_image() -> dict[str, str]:
    return dict(re.findall(r"(POLYWIRE_SERVE_\w+)=(\S+)", (CONTAINER / "Dockerfile").read_text("utf-8")))


def services(name: str = "cluster", **variables: str) -> dict[str, dict[str, Any]]:
    """Return the services of a compose file with these variables.

    Supported: ${NAME:-otherwise}, ${NAME:+instead}, ${NAME:?needed}.
    """

    def value(found: re.Match[str]) -> str:
        given, word = (GIVEN | variables).get(found["name"], ""), found["word"]
        assert given or found["how"] != "?", word
        return {"-": given or word, "+": word if given else "", "?": given}[found["how"]]

    text = re.sub(
        r"\$\{(?P<name>\w+):(?P<how>[-+?])(?P<word>[^}]*)\}", value, (CONTAINER / f"{name}.yaml").read_text("utf-8")
    )
    assert "$" not in "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def of_compose(**variables: str) -> dict[str, str]:
    return dict(services("compose", **variables)["polywire"]["environment"])


def kubernetes(name: str) -> dict[str, Any]:
    """Return the objects of a file, by kind; it has one of a kind."""
    entries = list(yaml.safe_load_all((KUBERNETES / f"{name}.yaml").read_text("utf-8")))
    found = {entry["kind"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


def workload(name: str) -> dict[str, Any]:
    found = kubernetes(name)
    return dict(found["Deployment" if "Deployment" in found else "StatefulSet"]["spec"])


def pod(name: str = "cluster") -> dict[str, Any]:
    found: dict[str, Any] = workload(name)["template"]["spec"]
    return found


def container(name: str = "cluster") -> dict[str, Any]:
    found: dict[str, Any]
    [found] = pod(name)["containers"]
    return found


def secrets() -> dict[str, dict[str, str]]:
    """Return the secrets that a user creates, by file: those of the bucket."""
    reported = {path.stem: path.read_text("utf-8").replace("\\\n#", "") for path in MANIFESTS}
    return {name: dict(re.findall(r"--from-literal=(\w+)=(\S+)", text)) for name, text in reported.items()}


def of_a_pod(name: str, bucket: str = "") -> dict[str, str]:
    """Return a pod's environment. bucket: the file that creates the bucket's secret."""
    fields = {"metadata.name": "polywire-7d4f9c-x2x1", "status.podIP": "10.1.2.3"}
    return (secrets()[bucket] if bucket else {}) | {
        entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container(name)["env"]
    }


@pytest.mark.parametrize(
    "given",
    [
        of_compose(),
        of_compose(POLYWIRE_HOST="127.0.0.1"),
        services()["broker-2"]["environment"],
        services(POLYWIRE_HOST="127.0.0.1")["broker-2"]["environment"],
        of_a_pod("polywire"),
        of_a_pod("cluster", "cluster"),
        of_a_pod("cluster", "versitygw"),
    ],
    ids=[
        "compose",
        "compose and a host",
        "compose of three",
        "compose of three and a host",
        "kubernetes",
        "kubernetes of three",
        "kubernetes of three and versitygw",
    ],
)
def test_a_broker_starts_with_the_settings_of_the_containers(
    given: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / "users"
    add_user(users, "admin", "a password", "all")
    settings = of_the_image() | dict(given) | {"POLYWIRE_SERVE_USERS": str(users)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
        assert (
            name.startswith("AWS_") or f"`--{name.removeprefix('POLYWIRE_SERVE_').lower().replace('_', '-')}" in OPTIONS
        )
    monkeypatch.chdir(tmp_path)
    assert run(["config", "check"]) == EXIT_DONE
    reported = capsys.readouterr().err
    for wire in ("polywire on 0.0.0.0:9555", "kafka on 0.0.0.0:9094", "iggy on 0.0.0.0:8090", "cursus on 0.0.0.0:9000"):
        assert wire in reported


@pytest.mark.parametrize(
    ("name", "brokers"), [("compose", ["polywire"]), ("cluster", ["broker-1", "broker-2", "broker-3"])]
)
def test_published_ports_of_compose_match_the_brokers_listeners(name: str, brokers: list[str]) -> None:
    found, published = services(name, POLYWIRE_HOST="kafka.example"), []
    for broker in brokers:
        settings = found[broker]["environment"]
        listens = {value.rpartition(":")[2]: key for key, value in settings.items() if value.startswith("0.0.0.0:")}
        for host, _, inside in (port.rpartition(":") for port in found[broker]["ports"]):
            published.append(host)
            assert host.startswith("127.0.0.1:"), "ports are published to other machines only on request"
            if listens[inside] == "POLYWIRE_SERVE_KAFKA":
                assert settings["POLYWIRE_SERVE_KAFKA_ADVERTISE"] == f"kafka.example:{host.rpartition(':')[2]}"
    assert len(set(published)) == len(published) == 3 * len(brokers)
    assert {
        one["environment"]["POLYWIRE_SERVE_KAFKA_ADVERTISE"] for key, one in services(name).items() if key in brokers
    } == {"auto"}


def test_brokers_of_one_bucket_have_distinct_names_and_addresses() -> None:
    brokers = {name: service["environment"] for name, service in services().items() if name.startswith("broker-")}
    assert len(brokers) == 3
    for name, settings in brokers.items():
        assert settings["POLYWIRE_SERVE_NODE"] == settings["POLYWIRE_SERVE_ADVERTISE"] == name
        assert services()[name]["depends_on"] == {"objects": {"condition": "service_healthy"}}
    common = [{key: settings[key] for key in settings if key not in APART} for settings in brokers.values()]
    assert common[0] == common[1] == common[2]


def gateways() -> list[tuple[list[str], str, Mapping[str, str]]]:
    """Return the command of each bucket server, its volume, and the brokers' bucket settings."""
    compose, pods = services(), container("versitygw")
    [mount] = [one["mountPath"] for one in pods["volumeMounts"] if one["name"] == "bucket"]
    return [
        (
            compose["objects"]["command"],
            compose["objects"]["volumes"][0].partition(":")[2],
            compose["broker-1"]["environment"],
        ),
        (pods["args"], mount, secrets()["versitygw"]),
    ]


def test_the_bucket_is_where_the_brokers_look_for_it() -> None:
    for words, disk, reported in gateways():
        url = reported["AWS_ENDPOINT_URL"]
        assert url == f"http://objects{words[words.index('--port') + 1]}"
        assert words[words.index("--region") + 1] == reported["AWS_REGION"]
        bucket = reported["POLYWIRE_SERVE_BUCKET"].removeprefix("s3://").partition("/")[0]
        assert words[-2:] == ["posix", disk.removesuffix(f"/{bucket}")]
        assert disk.endswith(f"/{bucket}"), "the volume is the bucket"
    found = kubernetes("versitygw")
    assert found["Service"]["metadata"]["name"] == "objects"
    assert found["Service"]["spec"]["ports"] == [{"name": "s3", "port": 7070}]
    asked = {entry["valueFrom"]["secretKeyRef"]["key"] for entry in container("versitygw")["env"]}
    assert asked == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= secrets()["versitygw"].keys()
    images = {service["image"] for service in services().values()} | {container("versitygw")["image"]}
    assert len(images) == 2, "of brokers and one of the server"


def test_the_health_check_of_the_bucket_server_uses_its_address() -> None:
    [compose, pods] = gateways()
    words = compose[0]
    port, path = words[words.index("--port") + 1], words[words.index("--health") + 1]
    assert services()["objects"]["healthcheck"]["test"][-1] == f"http://127.0.0.1{port}{path}"
    path = pods[0][pods[0].index("--health") + 1]
    probes = [container("versitygw")[name]["httpGet"] for name in ("readinessProbe", "livenessProbe")]
    assert probes == [{"path": path, "port": "s3"}] * 2


@pytest.mark.parametrize("name", ["polywire", "cluster", "versitygw"])
def test_a_pod_has_no_unneeded_privilege(name: str) -> None:
    one = pod(name)
    assert one["automountServiceAccountToken"] is False
    assert one["enableServiceLinks"] is False, "a service could be called polywire-serve"
    rights = one["securityContext"]
    assert rights["runAsNonRoot"] is True
    assert rights["runAsUser"] == rights["runAsGroup"] == rights["fsGroup"] == 10001
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container(name)["resources"]["limits"]
    mounted = {mount["name"] for mount in container(name)["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in workload(name).get("volumeClaimTemplates", [])}
    assert mounted == {volume["name"] for volume in one["volumes"]} | claimed


@pytest.mark.parametrize("name", ["compose", "cluster"])
def test_a_container_has_no_unneeded_privilege(name: str) -> None:
    for service in services(name).values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "user"} & service.keys()


@pytest.mark.parametrize("name", ["polywire", "cluster"])
def test_kubernetes_uses_the_brokers_ports_and_health_checks(name: str) -> None:
    broker, settings = container(name), of_a_pod(name)
    listens = {port["name"]: port["containerPort"] for port in broker["ports"]}
    for wire, port in listens.items():
        assert settings[f"POLYWIRE_SERVE_{wire.upper()}"] == f"0.0.0.0:{port}"
    assert len(listens) == sum(value.startswith("0.0.0.0:") for value in settings.values())
    service = kubernetes(name)["Service"]["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == listens
    labels = workload(name)["template"]["metadata"]["labels"]
    assert service["selector"] == workload(name)["selector"]["matchLabels"] == labels
    assert broker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert broker["livenessProbe"]["httpGet"] == broker["startupProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert broker["imagePullPolicy"] == "IfNotPresent", "otherwise a moving tag is pulled from a registry"


def test_a_pod_is_named_uniquely_and_is_drained_before_it_ends() -> None:
    settings = of_a_pod("cluster", "cluster")
    assert settings["POLYWIRE_SERVE_NODE"] == "polywire-7d4f9c-x2x1"
    assert settings["POLYWIRE_SERVE_ADVERTISE"] == "10.1.2.3"
    assert workload("cluster")["replicas"] == 3
    assert not [volume for volume in pod()["volumes"] if "persistentVolumeClaim" in volume], "the bucket has everything"
    budget = kubernetes("cluster")["PodDisruptionBudget"]["spec"]
    assert budget == {"maxUnavailable": 1, "selector": workload("cluster")["selector"]}
    [*_, command] = container()["lifecycle"]["preStop"]["exec"]["command"]
    drain, waits = (shlex.split(one) for one in command.split(";"))
    assert drain[:3] == ["polywire", "cluster", "drain"]
    assert [word.strip("$") in settings for word in drain[3:5]] == [True, True]
    seconds = float(drain[drain.index("--timeout-s") + 1]) + float(waits[1])
    assert seconds + ServeConfig().drain_timeout_s < pod()["terminationGracePeriodSeconds"]
    gib = float(settings["POLYWIRE_SERVE_CACHE_GIB"])
    [cache] = [volume["emptyDir"]["sizeLimit"] for volume in pod()["volumes"] if volume["name"] == "cache"]
    assert gib < float(cache.removesuffix("Gi")), "and the journal's slots"


def test_secrets_are_created_by_the_names_that_pods_use() -> None:
    for path in MANIFESTS:
        made = set(re.findall(r"create secret generic ([\w-]+)", path.read_text("utf-8")))
        users = [volume["secret"]["secretName"] for volume in pod(path.stem)["volumes"] if "secret" in volume]
        bucket = [source["secretRef"]["name"] for source in container(path.stem).get("envFrom", [])]
        bucket += [
            entry["valueFrom"]["secretKeyRef"]["name"]
            for entry in container(path.stem)["env"]
            if "secretKeyRef" in str(entry)
        ]
        assert made == {*users, *bucket}
    [source] = container("cluster")["envFrom"]
    assert source == {"secretRef": {"name": "polywire-bucket"}}


# The Helm chart, which renders the manifests


def rendered(*options: str, release: str = "polywire", code: int = 0) -> str:
    """Return what Helm prints for the chart. Skips the test without Helm."""
    helm = os.environ.get("POLYWIRE_HELM") or shutil.which("helm")
    if helm is None:
        pytest.skip("helm is missing and POLYWIRE_HELM is not set: the chart was NOT rendered")
    done = subprocess.run(
        [helm, "template", release, str(KUBERNETES), *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode != 0) == bool(code), done.stderr
    return done.stdout or done.stderr


def rendered_objects(*options: str, release: str = "polywire") -> dict[str, Any]:
    return {entry["kind"]: entry for entry in yaml.safe_load_all(rendered(*options, release=release))}


def without_empty_annotations(objects: Any) -> Any:
    if isinstance(objects, dict):
        return {
            key: without_empty_annotations(value)
            for key, value in objects.items()
            if (key, value) != ("annotations", {})
        }
    return list(map(without_empty_annotations, objects)) if isinstance(objects, list) else objects


@pytest.mark.parametrize(("name", "options"), [("polywire", ()), ("cluster", ("--set", "cluster=true"))])
def test_the_chart_renders_the_manifests(name: str, options: tuple[str, ...]) -> None:
    assert without_empty_annotations(rendered_objects(*options)) == kubernetes(name)


def test_values_of_the_chart_apply() -> None:
    found = rendered_objects(
        *("--set", "cluster=true,replicas=5,image=registry/polywire:1,usersSecret=u,bucketSecret=b"),
        *(
            "--set",
            "env.POLYWIRE_SERVE_INSECURE=null,env.POLYWIRE_SERVE_SLOT_MIB=100000000,env.POLYWIRE_SERVE_FLUX=off",
        ),
        *(
            "--set",
            "service.type=LoadBalancer,service.annotations.a=1,serviceAccountAnnotations.role=r,podAnnotations.p=q",
        ),
        *("--set", "resources.limits.memory=4Gi,pod.nodeSelector.disk=ssd"),
        *("--set-json", 'volumes=[{"name":"tls","secret":{"secretName":"tls"}}]'),
        *("--set-json", 'volumeMounts=[{"name":"tls","mountPath":"/etc/tls"}]'),
        release="logs",
    )
    spec = found["Deployment"]["spec"]
    inside = spec["template"]["spec"]
    [broker] = inside["containers"]
    env = {entry["name"]: entry.get("value") for entry in broker["env"]}
    assert "POLYWIRE_SERVE_INSECURE" not in env
    assert (env["POLYWIRE_SERVE_SLOT_MIB"], env["POLYWIRE_SERVE_FLUX"]) == ("100000000", "off")
    assert (spec["replicas"], broker["image"], inside["nodeSelector"]) == (5, "registry/polywire:1", {"disk": "ssd"})
    assert broker["resources"]["limits"] == {"memory": "4Gi"}
    assert broker["resources"]["requests"]["memory"] == "1Gi"
    assert broker["envFrom"] == [{"secretRef": {"name": "b"}}]
    secret_names = [volume["secret"]["secretName"] for volume in inside["volumes"] if "secret" in volume]
    assert secret_names == ["u", "tls"]
    assert broker["volumeMounts"][-1] == {"name": "tls", "mountPath": "/etc/tls"}
    assert inside["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"] == "logs"
    assert found["ServiceAccount"]["metadata"]["annotations"] == {"role": "r"}
    assert found["Service"]["spec"]["type"] == "LoadBalancer"
    assert spec["template"]["metadata"]["annotations"] == {"p": "q"}


def test_the_values_with_tls_on_the_page_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "operate" / "containers.md").read_text("utf-8")
    text = page.partition("```yaml\nenv:")[2].partition("```")[0]
    (tmp_path / "values.yaml").write_text(f"env:{text}")
    found = rendered_objects("--values", str(tmp_path / "values.yaml"))["StatefulSet"]["spec"]["template"]["spec"]
    [broker] = found["containers"]
    assert {mount["name"] for mount in broker["volumeMounts"]} >= {volume["name"] for volume in found["volumes"]}
    certificates = Certificates(tmp_path)
    add_user(tmp_path / "users", "admin", "a password", "all")
    files = {
        "USERS": tmp_path / "users",
        "TLS_CERTIFICATE": certificates.path("server"),
        "TLS_KEY": certificates.path("server", "key"),
    }
    for entry in broker["env"]:
        monkeypatch.setenv(entry["name"], entry["value"])
    for name, path in files.items():
        monkeypatch.setenv(f"POLYWIRE_SERVE_{name}", str(path))
    monkeypatch.chdir(tmp_path)
    assert run(["config", "check"]) == EXIT_DONE
    assert "kafka-tls on 0.0.0.0:9094" in capsys.readouterr().err


def test_two_releases_share_no_name_and_no_label() -> None:
    for options in ((), ("--set", "cluster=true")):
        text = rendered(*options, release="logs")
        assert "app.kubernetes.io/name: polywire" not in text
        names = {entry["metadata"]["name"] for entry in yaml.safe_load_all(text)}
        assert names == {"logs"}
    single = rendered_objects("--set", "storage.size=5Gi,storage.class=fast", release="logs")["StatefulSet"]["spec"]
    assert single["serviceName"] == "logs"
    claim = single["volumeClaimTemplates"][0]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("fast", "5Gi")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("replicas=2", "would be separate logs"),
        ("imgae=x", "imgae"),
        ("env.lower=x", "lower"),
        ("storage.size=5", "got number, want string"),
    ],
)
def test_a_wrong_value_is_rejected(option: str, text: str) -> None:
    assert text in rendered("--set", option, code=1)


def test_the_chart_has_the_version_and_describes_every_value() -> None:
    chart = yaml.safe_load((KUBERNETES / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] == chart["appVersion"] == VERSION
    schema = json.loads((KUBERNETES / "values.schema.json").read_text("utf-8"))
    chart_values = yaml.safe_load((KUBERNETES / "values.yaml").read_text("utf-8"))
    assert set(schema["properties"]) == {"global", *chart_values}
    assert chart_values["image"] == container()["image"]


def test_the_image_is_compiled_and_can_reach_a_bucket() -> None:
    text = (CONTAINER / "Dockerfile").read_text("utf-8")
    assert "POLYWIRE_COMPILE=1 pip wheel" in text, "an image must not run from source"
    assert ".whl)[bucket]" in text


def test_the_build_context_of_the_image_has_what_it_copies_and_no_more() -> None:
    """As a builder reads the list: the last line that matches a path, or a folder above it, decides."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (CONTAINER / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    lines = [
        line for line in (CONTAINER / "Dockerfile.dockerignore").read_text("utf-8").splitlines() if line[:1] not in "#"
    ]

    def is_seen(path: str) -> bool:
        seen, above = True, [path, *map(str, Path(path).parents)]
        for line in lines:
            pattern = line.removeprefix("!")
            names = [Path(one).name for one in above] if pattern.startswith("**/") else above
            if any(fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in names if name != "."):
                seen = line.startswith("!")
        return seen

    words = {word for line in copied for word in line.split()}
    assert "src" in words
    assert [word for word in words if not is_seen(word.removesuffix("*"))] == []
    assert is_seen("src/polywire/records/batch.py")
    for path in (
        "src/polywire/records/batch.c",
        "src/polywire/x.cpython-313-x86_64-linux-gnu.so",
        ".venv/bin/python",
        "tests/a.py",
    ):
        assert not is_seen(path)


def test_a_release_builds_for_every_python_and_tests_each_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    classifiers = project["project"]["classifiers"]
    pythons = {words[-1] for words in (name.split(" :: ") for name in classifiers) if "." in words[-1]}
    wheels = project["tool"]["cibuildwheel"]
    assert set(wheels["build"].split()) == {f"cp{python.replace('.', '')}-*" for python in pythons}
    assert wheels["test-command"] == "python -I {project}/tools/installed.py --compiled"
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    assert "installed.py --pure" in workflow, "the source distribution is tested, too"
    assert (ROOT / "tools" / "installed.py").exists()
