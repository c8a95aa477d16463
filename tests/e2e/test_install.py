"""The wheel and the source distribution as users get them: installed into a new environment, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Final

import pytest

from polywire.build_info import VERSION, compilable_modules

ROOT: Final = Path(__file__).parents[2]
INSTALL: Final = ("-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--quiet")
BUILD_SECONDS_MAX: Final = 600
TRIAL: Final = ROOT / "tools" / "installed.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * BUILD_SECONDS_MAX)]


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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed or about to be, and nothing that was built."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    copy = tmp_path_factory.mktemp("checkout")
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return copy


@pytest.fixture(scope="module")
def source_distribution(checkout: Path) -> Path:
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
    """Interpreter of a new environment with the wheel, which sees what polywire depends on but not the checkout."""
    venv.create(place, with_pip=True, symlinks=True)
    [packages] = {Path(path) for path in sys.path if path.endswith("site-packages") and "cyclopts" in os.listdir(path)}
    own = next((place / "lib").glob("python*")) / "site-packages"
    for entry in packages.iterdir():
        if "polywire" not in entry.name and not (own / entry.name).exists():
            (own / entry.name).symlink_to(entry)
    python = place / "bin" / "python"
    run(str(python), *INSTALL, str(wheel), cwd=place)
    return python


@pytest.fixture(scope="module")
def wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not compiled, as where there is no compiler; also quick to make."""
    return build_wheel(source_distribution, tmp_path_factory.mktemp("wheel"), CC="no-such-compiler")


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def compiled_python(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a new environment with a compiled wheel, where this machine has a compiler."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"NOT TRIED: a compiled wheel, for want of a C compiler ({compiler})")
    built = build_wheel(source_distribution, tmp_path_factory.mktemp("compiled-wheel"))
    return environment_with(built, tmp_path_factory.mktemp("compiled-environment"))


def test_the_source_distribution_has_what_builds_it(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "src/polywire/py.typed"} <= names
    assert {"src/polywire/records/build.py", "src/polywire/records/build.pxd"} <= names


def test_the_wheel_has_sources_and_declarations(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        path.relative_to(ROOT / "src").as_posix()
        for pattern in ("*.py", "*.pxd", "py.typed")
        for path in (ROOT / "src").rglob(pattern)
        if not path.is_relative_to(ROOT / "src" / "polywire.egg-info")
    }
    assert wanted - names == set()
    assert "pyspark_polywire.py" in names
    assert not [name for name in names if name.endswith((".c", ".html")) or name.startswith(("tests/", "tools/"))]


def test_the_command_runs(python: Path, tmp_path: Path) -> None:
    assert run(str(python), "-m", "polywire", "--version", cwd=tmp_path).strip() == VERSION
    assert run(str(python.with_name("polywire")), "--version", cwd=tmp_path).strip() == VERSION


def test_every_module_is_the_installed_one(python: Path, tmp_path: Path) -> None:
    for name in (*compilable_modules(), "polywire.server.lifecycle", "polywire.client.sync", "pyspark_polywire"):
        place = run(str(python), "-c", f"import {name} as module; print(module.__file__)", cwd=tmp_path).strip()
        assert Path(place).is_relative_to(python.parents[1]), name


@pytest.mark.parametrize(("environment", "kind"), [("python", "--pure"), ("compiled_python", "--compiled")])
def test_what_is_installed_serves(environment: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    installed: Path = request.getfixturevalue(environment)
    told = run(str(installed), "-I", str(TRIAL), kind, cwd=tmp_path)
    assert "wrote and read over cursus, flux, iggy, kafka, kafka07, polywire" in told


def test_the_trial_refuses_a_checkout(tmp_path: Path) -> None:
    """What would pass for the installed package and is none makes the trial fail."""
    done = subprocess.run(
        [sys.executable, TRIAL, "--pure"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 1
    assert "not the installed package" in done.stderr
