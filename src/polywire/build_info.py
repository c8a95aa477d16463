"""What this copy of the package is: its version, and which of its modules run compiled.

Promises: standard library only, and nothing else of the package, so that ``setup.py`` can run this file by itself. Must not know: what the
modules do.
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

# How a source, and another file of declarations, names the declarations that are compiled into it.
_DECLARED: Final = re.compile(r"^ *from (?:cython\.cimports\.)?(polywire[\w.]*) c?import ", re.MULTILINE)


def compilable_modules() -> list[str]:
    """Names of the modules written in Cython's pure-Python mode: those that import ``cython``. Each also runs as it is."""
    package = Path(__file__).parent
    names = [".".join(("polywire", *path.relative_to(package).with_suffix("").parts)) for path in package.rglob("*.py")]
    return sorted(name for name in names if source_of(name) is not None)


def compiled_modules() -> dict[str, bool]:
    """Name of every module that can be compiled → whether an import here and now takes the compiled one."""
    return {name: _is_extension(find_spec(name)) for name in compilable_modules()}


def stale_modules() -> list[str]:
    """Modules whose compiled form is older than their source or declarations: what runs is not what is written."""
    found = []
    for name in compilable_modules():
        spec, source = find_spec(name), source_of(name)
        if spec is None or source is None or spec.origin is None or not _is_extension(spec):
            continue
        if Path(spec.origin).stat().st_mtime < max(path.stat().st_mtime for path in compiled_from(source)):
            found.append(name)
    return found


def compiled_from(source: Path) -> set[Path]:
    """A compilable module's file and all declarations that are compiled with it: its own, those it names, and those that these name."""
    found: set[Path] = set()
    named = {source, source.with_suffix(".pxd")}
    while named:
        path = named.pop()
        if not path.exists() or path in found:
            continue
        found.add(path)
        named |= {_file_of(name, ".pxd") for name in _DECLARED.findall(path.read_text(encoding="utf-8"))}
    return found


def source_of(name: str) -> Path | None:
    """File of a compilable module of this package, None when it does not exist or is plain Python."""
    path = _file_of(name, ".py")
    if not path.exists() or "\nimport cython\n" not in path.read_text(encoding="utf-8"):
        return None
    return path


def _file_of(name: str, suffix: str) -> Path:
    return Path(__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(suffix)


def prefer_sources() -> None:
    """Import every module of this package from its source from now on, compiled or not (``POLYWIRE_PURE=1``).

    Raises ImportError without Cython, whose shadow module the sources import.
    """
    if find_spec("cython") is None:
        raise ImportError("POLYWIRE_PURE=1 runs the sources, which need Cython: pip install cython", name="cython")
    sys.meta_path.insert(0, _SourceFinder())


def describe() -> str:
    """Return one line for people: the version, and how much of it runs compiled."""
    found = compiled_modules()
    missing = [name.removeprefix("polywire.") for name, is_compiled in found.items() if not is_compiled]
    if not missing:
        return f"polywire {VERSION} (compiled)"
    if len(missing) == len(found):
        return f"polywire {VERSION} (uncompiled, slower)"
    return f"polywire {VERSION} (partly compiled, without {', '.join(missing)})"


class _SourceFinder:
    """Finds modules of this package; where the ordinary finder chose an extension, it takes the source beside it."""

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
