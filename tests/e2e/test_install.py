"""The wheel and the source distribution as users get them: installed into a new environment, without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Final

import pytest

from polywire.build_info import VERSION, compilable_modules, source_of
from tests.e2e.installation import BUILD_SECONDS_MAX, ROOT, build_wheel, copy_checkout, environment_with, run

TRIAL: Final = ROOT / "tools" / "installed.py"
COMPILED_ALONE: Final = "client/cursor"  # a small module
HASTY: Final = f"""\
for word; do
    case $word in
    src/*.c) source=$word ;;
    build/temp*.o) object=$word ;;
    esac
done
if [ -n "$source" ] && cmp -s "$source" "{ROOT}/$source" && [ "{ROOT}/$object" -nt "{ROOT}/$source" ]; then
    exec cp "{ROOT}/$object" "$object"
fi
exec $real "$@" -O0
"""
"""Copies what `make build` compiled from the same C, and compiles everything else without optimization."""

STRICT: Final = [
    f"-Werror={name}" for name in ("incompatible-pointer-types", "int-conversion", "implicit-function-declaration")
]
"""GCC 14 and Clang 16 refuse these; older versions only warn."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * BUILD_SECONDS_MAX)]


def compiler_at(path: Path, body: str) -> str:
    """Write a script that replaces the C compiler; ``body`` calls the real one as ``$real``."""
    real = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if shutil.which(real.split()[0]) is None:
        pytest.skip(f"NOT TRIED: what takes a C compiler ({real})")
    path.write_text(f'#!/bin/sh\nreal="{real}"\n{body}')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def compiled_wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a compiled wheel, if there is a compiler, from objects of this checkout where they are the same."""
    place = tmp_path_factory.mktemp("compiled-wheel")
    hasty = compiler_at(place.parent / "hasty-cc", HASTY)
    return build_wheel(source_distribution, place, CC=hasty)


@pytest.fixture(scope="module")
def compiled_python(compiled_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with that wheel."""
    return environment_with(compiled_wheel, tmp_path_factory.mktemp("compiled-environment"))


def test_new_compilers_accept_the_modules_that_call_c(tmp_path: Path) -> None:
    compiler = compiler_at(tmp_path / "cc", 'exec $real "$@"\n')
    paths = [path for name in compilable_modules() if (path := source_of(name)) is not None]
    sources = [path.with_suffix(".c") for path in paths if "cimports.cpython" in path.read_text(encoding="utf-8")]
    assert sources
    if not all(source.exists() for source in sources):
        pytest.skip("NOT TRIED: the modules of this checkout are not compiled")
    for source in sources:
        run(compiler, "-fsyntax-only", f"-I{sysconfig.get_path('include')}", *STRICT, str(source), cwd=tmp_path)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


@pytest.mark.parametrize(("kind", "needs_cython"), [("wheel", True), ("compiled_wheel", False)])
def test_cython_is_installed_if_modules_are_not_compiled(
    kind: str, needs_cython: bool, request: pytest.FixtureRequest
) -> None:
    needed = metadata(request.getfixturevalue(kind)).get_all("Requires-Dist", [])
    assert any(line.startswith("cython") for line in needed) is needs_cython
    assert any(line.startswith("msgspec") for line in needed)


def test_the_package_description_has_no_broken_links(wheel: Path) -> None:
    reported = metadata(wheel)
    text = str(reported.get_payload())
    assert reported["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# Polywire\n")
    assert set(re.findall(r"\]\(([^:)]*)[:)]", text)) <= {"https", "http"}


def test_one_wheel_runs_on_every_system(source_distribution: Path, tmp_path: Path) -> None:
    built = build_wheel(source_distribution, tmp_path, POLYWIRE_COMPILE="0")
    assert built.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith((".so", ".pyd"))]


@pytest.fixture(scope="module")
def forgetful_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a compiler that compiles one of our modules and fails on all others."""
    body = f'case "$*" in *{COMPILED_ALONE}*) exec $real "$@" ;; esac\necho "out of patience" >&2\nexit 1\n'
    return compiler_at(tmp_path_factory.mktemp("compiler") / "cc", body)


def test_a_build_succeeds_if_the_compiler_fails_on_a_module(
    source_distribution: Path, forgetful_compiler: str, tmp_path: Path
) -> None:
    """All modules then run from source, because uncompiled modules cannot use what only compiled ones see."""
    built = build_wheel(source_distribution, tmp_path, CC=forgetful_compiler)
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
    assert any(line.startswith("cython") for line in metadata(built).get_all("Requires-Dist", []))
    assert built.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("compiler", ["forgetful", "missing"])
def test_a_release_build_can_require_compilation(
    source_distribution: Path, forgetful_compiler: str, tmp_path: Path, compiler: str
) -> None:
    called = forgetful_compiler if compiler == "forgetful" else "no-such-compiler"
    with pytest.raises(AssertionError, match="POLYWIRE_COMPILE=1 demands all"):
        build_wheel(source_distribution, tmp_path, CC=called, POLYWIRE_COMPILE="1")


def test_the_source_distribution_has_everything_to_build_it(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "src/polywire/py.typed"} <= names
    assert {"src/polywire/records/build.py", "src/polywire/records/build.pxd"} <= names
    assert not [name for name in names if name.endswith(".c")], "a build translates the modules itself"


def test_the_wheel_has_sources_and_declarations(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        path.relative_to(ROOT / "src").as_posix()
        for pattern in ("*.py", "*.pxd", "*.pyi", "py.typed")
        for path in (ROOT / "src").rglob(pattern)
        if not path.is_relative_to(ROOT / "src" / "polywire.egg-info")
    }
    assert wanted - names == set()
    assert "pyspark_polywire.py" in names
    assert "polywire/http/static/index.html" in names
    built = [name for name in names if name.endswith((".c", ".html")) and not name.startswith("polywire/http/static/")]
    assert not [*built, *(name for name in names if name.startswith(("tests/", "tools/")))]


def test_the_command_runs(python: Path, tmp_path: Path) -> None:
    assert run(str(python), "-m", "polywire", "--version", cwd=tmp_path).strip() == VERSION
    assert run(str(python.with_name("polywire")), "--version", cwd=tmp_path).strip() == VERSION


def test_every_module_is_imported_from_the_installed_package(python: Path, tmp_path: Path) -> None:
    names = (*compilable_modules(), "polywire.server.lifecycle", "polywire.client.sync", "pyspark_polywire")
    places = (
        "import importlib, sys; print(*(importlib.import_module(name).__file__ for name in sys.argv[1:]), sep='\\n')"
    )
    found = run(str(python), "-c", places, *names, cwd=tmp_path).splitlines()
    assert len(found) == len(names)
    assert [place for place in found if not Path(place).is_relative_to(python.parents[1])] == []


@pytest.mark.parametrize(("environment", "kind"), [("python", "--pure"), ("compiled_python", "--compiled")])
def test_the_installed_package_serves_every_protocol(
    environment: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    installed: Path = request.getfixturevalue(environment)
    reported = run(str(installed), "-I", str(TRIAL), kind, cwd=tmp_path)
    assert "wrote and read over cursus, flux, iggy, kafka, kafka07, polywire" in reported


def test_the_trial_refuses_a_checkout(tmp_path: Path) -> None:
    """The trial fails on packages that only look installed."""
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


def test_make_installs_a_compiled_checkout_without_compiling_again(wheel: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    copy_checkout(checkout)
    environment_with(wheel, checkout / ".venv")
    for done in (".made", ".base", ".built"):
        (checkout / ".venv" / done).touch()
        time.sleep(0.01)  # each depends on those before it
    calls = tmp_path / "calls"
    compiler = compiler_at(tmp_path / "cc", f'echo "$@" >> {calls}\nexit 1\n')
    run("make", "setup", cwd=checkout, CC=compiler)
    assert not calls.exists()
    source = run(".venv/bin/python", "-c", "import polywire; print(polywire.__file__)", cwd=checkout).strip()
    assert Path(source).is_relative_to(checkout / "src")


def test_make_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    copy_checkout(tmp_path)
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}
    # tests that make runs have variables of their own
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS"))}
    environment = others | unreachable
    made = subprocess.run(
        ["make", "setup"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert made.returncode != 0
    *_, error, advice, stopped = made.stderr.splitlines()
    assert error.startswith("ERROR: No matching distribution found for ")
    assert advice.startswith("could not install the packages of requirements/base.lock: check the network connection")
    assert stopped.startswith("make: ***")
    assert len(made.stderr.splitlines()) == 3
