"""The distribution as users get it: built from what is committed, installed into a new environment, without a network.

Promises: an environment sees what polywire depends on, and never the checkout. Fixtures for all end-to-end tests are made of this in
``conftest.py``.
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

ROOT: Final = Path(__file__).parents[2]
INSTALL: Final = ("-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--quiet")
BUILD_SECONDS_MAX: Final = 600


def made_once(made: str, factory: pytest.TempPathFactory, make: Callable[[Path], Path]) -> Path:
    """What the first worker of a test run that asks for it makes in a new directory; the others wait, and take the same."""
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
    """Standard output of a command that must succeed, run far from the checkout."""
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
    """What is committed or about to be, and nothing that was built."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return copy


def build_source_distribution(checkout: Path) -> Path:
    """The source distribution of a checkout."""
    build = "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
    name = run(sys.executable, "-c", build, cwd=checkout).splitlines()[-1]
    return checkout / "dist" / name


def build_wheel(source_distribution: Path, place: Path, **extra: str) -> Path:
    """Built from the source distribution, so that nothing is used that is not in it."""
    arguments = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(place))
    run(sys.executable, "-m", "pip", "wheel", *arguments, str(source_distribution), cwd=place, **extra)
    [built] = place.glob("*.whl")
    return built


def environment_with(wheel: Path, place: Path) -> Path:
    """Interpreter of a new environment with the wheel, which sees what polywire depends on, pip among it, but not the checkout."""
    venv.create(place, symlinks=True)
    [packages] = {Path(path) for path in sys.path if path.endswith("site-packages") and "cyclopts" in os.listdir(path)}
    own = next((place / "lib").glob("python*")) / "site-packages"
    for entry in packages.iterdir():
        if "polywire" not in entry.name and not (own / entry.name).exists():
            (own / entry.name).symlink_to(entry)
    python = place / "bin" / "python"
    run(str(python), *INSTALL, str(wheel), cwd=place)
    return python
