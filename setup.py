"""Builds the compiled modules, and says what depends on whether they are: the requirements.

Promises: where a module does not compile, and without a C compiler none does, all run from their sources: slower, and with Cython's shadow
module at run time, which nobody needs otherwise. That is said. Everything else about the distribution is in pyproject.toml.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import sys
import sysconfig
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
# Where Cython's own variable names a folder, what it made of the same sources before is taken from there.
CACHED = "CYTHON_CACHE_DIR" in os.environ
# Processes that are started by importing the main module anew would run this file once more.
TRANSLATORS = os.cpu_count() if multiprocessing.get_start_method() == "fork" else 0
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


def has_compiler() -> bool:
    """Whether the C compiler that would be called is there; False only where that is certain."""
    called = os.environ.get("CC") or sysconfig.get_config_var("CC")
    return sys.platform == "win32" or not called or shutil.which(shlex.split(called)[0]) is not None


def extensions() -> list[Any]:
    """One extension per compilable module, each optional: ``cythonize`` drops that flag, so it is set afterwards.

    Without a compiler they stay as they are: nobody would compile what is made of them.
    """
    sources = {name: INFO["source_of"](name) for name in INFO["compilable_modules"]()} if WANTED else {}
    modules = [
        Extension(name, [str(path.relative_to(HERE))], extra_compile_args=FLAGS)
        for name, path in sources.items()
        if path is not None
    ]
    if not modules or not has_compiler():
        return modules
    from Cython.Build import cythonize

    built: list[Any] = cythonize(  # type: ignore[no-untyped-call, unused-ignore]
        modules,
        include_path=["src"],
        compiler_directives={
            "language_level": 3,
            "warn.unreachable": False,  # a branch for the other way of running always is
        },
        annotate=bool(os.environ.get("POLYWIRE_ANNOTATE")),
        quiet=True,
        cache=CACHED,
        nthreads=TRANSLATORS,
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
        if self.extensions and not has_compiler():
            self.failed = dict.fromkeys((module.name for module in self.extensions), "there is no C compiler")
        else:
            self._run_forgiving()
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

    def _run_forgiving(self) -> None:
        try:
            super().run()
        except Exception as error:  # setuptools may raise nearly anything, OSError included
            self.failed.update({module.name: str(error) for module in self.extensions})

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
