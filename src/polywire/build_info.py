"""Version of this installation, and which of its modules run compiled.

This module imports only the standard library, because ``setup.py`` runs its file alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

VERSION: Final = "0.1.0"

# Matches imports of Cython declarations (.pxd) in sources and in other declaration files.
_DECLARED: Final = re.compile(r"^ *from (?:cython\.cimports\.(\S+) import|(polywire\S*) cimport) ", re.MULTILINE)


def compilable_modules() -> list[str]:
    """Return the names of modules that import ``cython``. They can be compiled, and also run as plain Python."""
    package = Path(__file__).parent
    names = [".".join(("polywire", *path.relative_to(package).with_suffix("").parts)) for path in package.rglob("*.py")]
    return sorted(name for name in names if source_of(name) is not None)


def compiled_modules() -> dict[str, bool]:
    """Return for each compilable module whether the compiled form would be imported now."""
    return {name: _is_extension(find_spec(name)) for name in compilable_modules()}


def stale_modules() -> list[str]:
    """Return the modules whose compiled form is older than their source or declarations."""
    found = []
    for name in compilable_modules():
        spec, source = find_spec(name), source_of(name)
        if spec is None or source is None or spec.origin is None or not _is_extension(spec):
            continue
        if Path(spec.origin).stat().st_mtime < max(path.stat().st_mtime for path in compiled_from(source)):
            found.append(name)
    return found


def compiled_from(source: Path) -> set[Path]:
    """Return the files that a module is compiled from: its source, its declarations, and all declarations that these
    import.
    """
    found: set[Path] = set()
    pending = {source, source.with_suffix(".pxd")}
    while pending:
        path = pending.pop()
        if not path.exists() or path in found:
            continue
        found.add(path)
        pending |= {_file_of("".join(names), ".pxd") for names in _DECLARED.findall(path.read_text(encoding="utf-8"))}
    return found


def source_of(name: str) -> Path | None:
    """Return the file of a compilable module, or None if it does not exist or is not compilable."""
    path = _file_of(name, ".py")
    if not path.exists() or "\nimport cython\n" not in path.read_text(encoding="utf-8"):
        return None
    return path


def _file_of(name: str, suffix: str) -> Path:
    return Path(__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(suffix)


def prefer_sources() -> None:
    """From now on, import all modules of this package from their Python source (``POLYWIRE_PURE=1``).

    Raises:
        ImportError: Cython is not installed; the sources import its module ``cython``.
    """
    if find_spec("cython") is None:
        raise ImportError("POLYWIRE_PURE=1 runs the sources, which need Cython: pip install cython", name="cython")
    sys.meta_path.insert(0, _SourceFinder())


def describe() -> str:
    """Return one line for users: the version, and whether the modules are compiled."""
    found = compiled_modules()
    missing = [name.removeprefix("polywire.") for name, is_compiled in found.items() if not is_compiled]
    if not missing:
        return f"polywire {VERSION} (compiled)"
    if len(missing) == len(found):
        return f"polywire {VERSION} (uncompiled, slower)"
    return f"polywire {VERSION} (partly compiled, without {', '.join(missing)})"


class _SourceFinder:
    """Finds the source of a module for which the default finder would load the compiled extension."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("polywire."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or not _is_extension(spec):
            return spec
        source = Path(spec.origin).with_name(name.rpartition(".")[2] + ".py")
        return spec_from_file_location(name, source) if source.exists() else spec


def _is_extension(spec: ModuleSpec | None) -> bool:
    return spec is not None and spec.origin is not None and spec.origin.endswith(tuple(EXTENSION_SUFFIXES))
