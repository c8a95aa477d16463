"""The distribution as users get it: built from committed files, installed into a new environment, without a network.

An environment has polywire's dependencies, and never the checkout. Fixtures in ``conftest.py`` use this module.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.installed_clients import folder_of

ROOT: Final = Path(__file__).parents[2]
TRANSLATED: Final = str(ROOT / "build" / "cython")  # the modules in C, by `make build` or an earlier build
INSTALL: Final = ("-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--quiet")
KAFKA_CLIENT: Final = "confluent_kafka"
WITH_KAFKA_CLIENT: Final = "quixstreams-3.28.1"  # the installed program that includes it
BUILD_SECONDS_MAX: Final = 600


def made_once(made: str, factory: pytest.TempPathFactory, make: Callable[[Path], Path]) -> Path:
    """Return what the first worker of a test run makes in a new directory; other workers wait and use the same."""
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with (shared / f"{made}.path").open("a+") as reported:
        fcntl.flock(reported, fcntl.LOCK_EX)
        reported.seek(0)
        if not (path := reported.read()):
            path = str(make(Path(tempfile.mkdtemp(prefix=f"{made}-", dir=shared))))
            reported.write(path)
    return Path(path)


def run(*command: str, cwd: Path, **extra: str) -> str:
    """Return standard output of a command that must succeed, run outside the checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "POLYWIRE_PURE")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment | extra,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_checkout(copy: Path) -> Path:
    """Copy what is committed or about to be, without build products."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return copy


def build_source_distribution(checkout: Path) -> Path:
    """Return the source distribution of a checkout."""
    build = "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
    name = run(sys.executable, "-c", build, cwd=checkout).splitlines()[-1]
    return checkout / "dist" / name


def build_wheel(source_distribution: Path, place: Path, **extra: str) -> Path:
    """Build a wheel from the source distribution, so that no other file is used."""
    arguments = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(place))
    command = ("-m", "pip", "wheel", *arguments, str(source_distribution))
    run(sys.executable, *command, cwd=place, CYTHON_CACHE_DIR=TRANSLATED, **extra)
    [built] = place.glob("*.whl")
    return built


def environment_with(wheel: Path, place: Path) -> Path:
    """Return the interpreter of a new environment with the wheel and its dependencies, but without the checkout.

    It also has a Kafka client, if one is installed for the tests.
    """
    venv.create(place, symlinks=True)
    [packages] = {Path(path) for path in sys.path if path.endswith("site-packages") and "cyclopts" in os.listdir(path)}
    own = next((place / "lib").glob("python*")) / "site-packages"
    for entry in [*packages.iterdir(), *folder_of(WITH_KAFKA_CLIENT).glob(f"{KAFKA_CLIENT}*")]:
        if "polywire" not in entry.name and not (own / entry.name).exists():
            (own / entry.name).symlink_to(entry)
    python = place / "bin" / "python"
    run(str(python), *INSTALL, str(wheel), cwd=place)
    return python
