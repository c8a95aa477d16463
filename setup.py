"""Builds the compiled modules, and says what depends on whether they are: the requirements.

Promises: without a C compiler the installation is slower, and needs Cython's shadow module at run time; with one it does not. The first is
said once. Everything else about the distribution is in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
INFO = runpy.run_path(str(HERE / "src" / "polywire" / "build_info.py"), run_name="build_info")
# Loads through casted pointers are how the hot loops read words: no strict aliasing, then.
# What a C compiler has to say of generated C helps nobody who installs this.
FLAGS = ["/O2"] if sys.platform == "win32" else ["-O3", "-g0", "-fno-strict-aliasing", "-w"]
# ``POLYWIRE_COMPILE=0``: one wheel for every system, of the sources alone.
WANTED = os.environ.get("POLYWIRE_COMPILE") != "0"
REQUIREMENTS = [
    "argon2-cffi>=23.1",
    "cramjam>=2.8",
    "cyclopts>=3",
    "h11>=0.16",
    "msgspec>=0.19",
    "prometheus-client>=0.21",
    "rich>=13.9",
    "starlette>=0.49",
    "structlog>=24.4",
    "uvloop>=0.21; sys_platform != 'win32'",
]
UNCOMPILED_REQUIREMENTS = ["cython>=3.1"]  # its shadow module, which sources import


def can_compile() -> bool:
    """Whether there is what compiles and links a module of Python: asked before anything is built, as requirements are."""
    with TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("#include <Python.h>\nPyMODINIT_FUNC PyInit_probe(void) { return NULL; }\n")
        command = build_ext(Distribution({"ext_modules": [Extension("probe", [str(source)])]}))
        command.build_lib = command.build_temp = folder
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            try:
                command.ensure_finalized()
                command.run()
            except Exception:  # no compiler at all: setuptools may raise nearly anything, OSError included
                return False
    return True


def description() -> str:
    """The README without its links to files of the checkout, which lead nowhere from an index of packages."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]+\)", r"\1", text)


def extensions() -> list[Any]:
    """One extension per compilable module, each optional: ``cythonize`` drops that flag, so it is set afterwards."""
    sources = {name: INFO["source_of"](name) for name in INFO["compilable_modules"]()} if WANTED else {}
    modules = [
        Extension(name, [str(path.relative_to(HERE))], extra_compile_args=FLAGS)
        for name, path in sources.items()
        if path is not None
    ]
    if not modules:
        return []
    from Cython.Build import cythonize

    built: list[Any] = cythonize(  # type: ignore[no-untyped-call, unused-ignore]
        modules,
        include_path=["src"],
        compiler_directives={"language_level": 3},
        annotate=bool(os.environ.get("POLYWIRE_ANNOTATE")),
        quiet=True,
    )
    for module in built:
        module.optional = True
    return built


class ForgivingBuild(build_ext):  # type: ignore[misc, unused-ignore]
    """Builds what it can and says once what it could not."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = os.cpu_count()
        self.failed: dict[str, str] = {}

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # no compiler at all: setuptools may raise nearly anything, OSError included
            self.failed.update({module.name: str(error) for module in self.extensions})
        for name in self.failed:  # what an earlier build left must not hide the newer source
            source = HERE / "src" / Path(*name.split("."))
            for left in [*source.parent.glob(f"{source.name}.*.so"), *source.parent.glob(f"{source.name}.*.pyd")]:
                left.unlink()
        if self.failed and COMPILES and not self.inplace:
            # The requirements, which were told before, are those of compiled modules.
            raise SystemExit(
                f"could not compile {', '.join(sorted(self.failed))}: set POLYWIRE_COMPILE=0 to do without"
            )
        if self.failed:
            reason = next(iter(self.failed.values())).strip().splitlines()[-1:]
            print(
                f"\nWARNING: {len(self.failed)} of {len(self.extensions)} modules could not be compiled"
                f" ({', '.join(sorted(self.failed))}): {' '.join(reason)}\n"
                "WARNING: polywire runs from their Python sources instead: everything works, many times slower."
                " Install a C compiler and run `make clean setup` to change that.\n",
                file=sys.stderr,
                flush=True,
            )

    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.failed[ext.name] = str(error)


COMPILES = WANTED and can_compile()

setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": ForgivingBuild},
    install_requires=REQUIREMENTS + ([] if COMPILES else UNCOMPILED_REQUIREMENTS),
    long_description=description(),
    long_description_content_type="text/markdown",
)
