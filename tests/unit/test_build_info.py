"""The package reports its version and which modules run compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path

import pytest

import polywire
from polywire import build_info


def test_the_version_is_the_distributions() -> None:
    assert polywire.__version__ == build_info.VERSION


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        ({"polywire.a": True, "polywire.b": True}, "compiled"),
        ({"polywire.a": False, "polywire.b": True}, "partly compiled, without a"),
        ({"polywire.a": False, "polywire.b": False}, "uncompiled, slower"),
    ],
)
def test_the_description_says_how_much_runs_compiled(
    compiled: dict[str, bool], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_info, "compiled_modules", lambda: compiled)
    assert build_info.describe() == f"polywire {build_info.VERSION} ({said})"


@pytest.mark.parametrize("suffix", EXTENSION_SUFFIXES)
def test_source_finder_prefers_the_source_beside_an_extension(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(build_info.__file__)
    chosen = ModuleSpec("polywire.build_info", None, origin=str(source.with_name("build_info" + suffix)))
    monkeypatch.setattr("importlib.machinery.PathFinder.find_spec", lambda *_: chosen)
    spec = build_info._SourceFinder.find_spec("polywire.build_info")
    assert spec is not None
    assert spec.origin == str(source)


def test_source_finder_ignores_other_packages() -> None:
    assert build_info._SourceFinder.find_spec("json.decoder") is None


def test_pure_environment_runs_everything_from_source() -> None:
    command = "import polywire; print(any(polywire.compiled_modules().values()))"
    environment = {**os.environ, "POLYWIRE_PURE": "1", "PYTHONPATH": str(Path(build_info.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_module_depends_on_the_declarations_it_imports() -> None:
    def names(module: str) -> set[str]:
        source = build_info.source_of(module)
        assert source is not None
        return {path.name for path in build_info.compiled_from(source)}

    assert names("polywire.records.checksum") == {"checksum.py", "checksum.pxd", "folding.pxd", "memory.pxd"}
    assert names("polywire.records.reshape") >= {"reshape.py", "runs.pxd", "memory.pxd"}
    assert "partition.pxd" not in names("polywire.log.journal.merging"), "it imports a type that is not compiled"


def test_a_newer_declaration_makes_its_modules_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = [name for name, extension in polywire.compiled_modules().items() if extension]
    newer = tmp_path / "folding.pxd"
    newer.touch()
    os.utime(newer, (2**33, 2**33))
    seen = build_info.compiled_from
    changed = build_info.source_of("polywire.records.checksum")
    monkeypatch.setattr(
        build_info, "compiled_from", lambda source: seen(source) | ({newer} if source == changed else set())
    )
    assert build_info.stale_modules() == (["polywire.records.checksum"] if compiled else [])
