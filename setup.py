"""Builds the compiled modules, and says what depends on whether they are: the requirements.

Promises: where a module does not compile, and without a C compiler none does, all run from their sources: slower, and with Cython's shadow
module at run time, which nobody needs otherwise. That is said. Everything else about the distribution is in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
INFO = runpy.run_path(str(HERE / "src" / "polywire" / "build_info.py"), run_name="build_info")
# Loads through casted pointers are how the hot loops read words: no strict aliasing, then.
# What a C compiler has to say of generated C helps nobody who installs this.
FLAGS = ["/O2"] if sys.platform == "win32" else ["-O3", "-g0", "-fno-strict-aliasing", "-w"]
# ``POLYWIRE_COMPILE=0``: one wheel for every system, of the sources alone. 1: everything compiles, or there is no wheel.
WANTED = os.environ.get("POLYWIRE_COMPILE") != "0"
DEMANDED = os.environ.get("POLYWIRE_COMPILE") == "1"
# Commands that name the requirements: the first is asked before anything is built, and believed; the others make what is installed.
DESCRIBING = {"dist_info", "bdist_wheel", "editable_wheel"}
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
    """Compiles everything or nothing: modules call each other past Python, so that a source cannot stand for one of them."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = os.cpu_count()
        self.failed: dict[str, str] = {}

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # no compiler at all: setuptools may raise nearly anything, OSError included
            self.failed.update({module.name: str(error) for module in self.extensions})
        if not self.failed:
            return
        names = ", ".join(sorted(self.failed))
        told = f"{len(self.failed)} of {len(self.extensions)} modules could not be compiled ({names})"
        if DEMANDED:
            raise SystemExit(f"{told}, and POLYWIRE_COMPILE=1 demands all")
        for module in self.extensions:  # what an earlier build left must not hide a newer source either
            source = HERE / "src" / Path(*module.name.split("."))
            for left in [*source.parent.glob(f"{source.name}.*.so"), *source.parent.glob(f"{source.name}.*.pyd")]:
                left.unlink()
        reason = next(iter(self.failed.values())).strip().splitlines()[-1:]
        print(
            f"\nWARNING: {told}: {' '.join(reason)}\n"
            "WARNING: polywire runs from its Python sources instead: everything works, many times slower."
            " Install a C compiler and install polywire again (in a checkout: make clean setup) to change that.\n",
            file=sys.stderr,
            flush=True,
        )

    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.failed[ext.name] = str(error)


def compiled_here() -> list[Any]:
    """The extensions of this distribution, none where one of them does not compile.

    Requirements are asked for before anything is built, and nobody asks again: so where the answer counts they are compiled now, and the
    build itself finds it done.
    """
    modules = extensions()
    if not modules or not DESCRIBING & set(sys.argv):
        return modules
    command = ForgivingBuild(Distribution({"name": "polywire", "ext_modules": modules}))
    command.ensure_finalized()
    command.run()
    return [] if command.failed else modules


MODULES = compiled_here()

setup(
    ext_modules=MODULES,
    cmdclass={"build_ext": ForgivingBuild},
    install_requires=REQUIREMENTS + ([] if MODULES else UNCOMPILED_REQUIREMENTS),
    long_description=description(),
    long_description_content_type="text/markdown",
)
