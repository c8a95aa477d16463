"""``python -m tools.wheels``: test the packages that users install (``make wheel-test``).

Wheels are built from the source distribution in an isolated environment: with a compiler, without one, and for every
system. Each is installed alone into an empty environment outside the checkout and must work there
(``tools/installed.py``). This needs the network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
TRIAL: Final = ROOT / "tools" / "installed.py"
# A compiler that fails simulates a machine without one.
KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "compiled": {"POLYWIRE_COMPILE": "1"},
    "without a compiler": {"CC": "/bin/false", "CXX": "/bin/false"},
    "pure": {"POLYWIRE_COMPILE": "0"},
}
NOT_OURS: Final = ("PYTHONPATH", "POLYWIRE_PURE", "VIRTUAL_ENV")


def run(*command: str | Path, cwd: Path, extra: Mapping[str, str] | None = None) -> str:
    """Run a command without the checkout's environment and return its output; exit with a message if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    done = subprocess.run(
        command, cwd=cwd, env=environment | dict(extra or {}), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}failed with exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def new_environment(place: Path) -> Path:
    """Create an empty environment; return its interpreter."""
    venv.create(place, with_pip=True, clear=True)
    return place / "bin" / "python"


def try_kind(kind: str, source: Path, folder: Path) -> None:
    """Build a wheel of one kind and test it."""
    builder = new_environment(folder / "builder")
    pip = (builder, "-m", "pip", "--disable-pip-version-check")
    run(
        *pip,
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--wheel-dir",
        folder,
        source,
        cwd=folder,
        extra=KINDS[kind],
    )
    [wheel] = folder.glob("*.whl")
    print(f"{kind}: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    if (kind == "compiled") is wheel.name.endswith("-py3-none-any.whl"):
        sys.exit("a wheel is one for every system where nothing is compiled, and no other is")
    python = new_environment(folder / "environment")
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", wheel, cwd=folder)
    shutil.copy(TRIAL, folder)  # a copy: the script must not run beside the checkout
    is_compiled = kind == "compiled"
    if (run(python, "-m", "pip", "list", "--format=freeze", cwd=folder).find("Cython==") < 0) is not is_compiled:
        sys.exit("Cython comes along where modules are not compiled, and nowhere else")
    how = "--compiled" if is_compiled else "--pure"
    print(run(python, "-I", folder / TRIAL.name, how, cwd=folder).splitlines()[-1], flush=True)


def main() -> None:
    """Test all kinds."""
    with tempfile.TemporaryDirectory(prefix="polywire-wheels-") as name:
        folder = Path(name)
        build = f"import setuptools.build_meta as backend; backend.build_sdist({name!r})"
        run(sys.executable, "-c", build, cwd=ROOT)
        [source] = folder.glob("*.tar.gz")
        for kind in KINDS:
            place = folder / kind.replace(" ", "-")
            place.mkdir()
            try_kind(kind, source, place)


if __name__ == "__main__":
    main()
