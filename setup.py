"""Compile the modules, and compute the requirements, which depend on whether they could be compiled.

If a module does not compile, as without a C compiler, all modules run from source: slower, and with Cython's Python part
as an additional requirement. The build prints a warning. Everything else about the distribution is in pyproject.toml.
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
# The hot loops read words through cast pointers, so strict aliasing is off. Warnings about generated C do not help users.
FLAGS = ["/O2"] if sys.platform == "win32" else ["-O3", "-g0", "-fno-strict-aliasing", "-w"]
# ``POLYWIRE_COMPILE=0`` builds one pure wheel for every system. 1 fails unless every module compiles.
WANTED = os.environ.get("POLYWIRE_COMPILE") != "0"
DEMANDED = os.environ.get("POLYWIRE_COMPILE") == "1"
# If Cython's own variable names a folder, earlier translations of the same sources are reused.
CACHED = "CYTHON_CACHE_DIR" in os.environ
# Without fork, worker processes would import this file and run it again.
TRANSLATORS = os.cpu_count() if multiprocessing.get_start_method() == "fork" else 0
# Commands that report the requirements: pip runs the first before the build and trusts it; the others build what is installed.
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
UNCOMPILED_REQUIREMENTS = ["cython>=3.1"]  # uncompiled modules import its Python part


def description() -> str:
    """Return the README without links to files of the checkout, which do not exist on the package index."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]+\)", r"\1", text)


def has_compiler() -> bool:
    """Return False if the C compiler certainly does not exist, otherwise True."""
    called = os.environ.get("CC") or sysconfig.get_config_var("CC")
    return sys.platform == "win32" or not called or shutil.which(shlex.split(called)[0]) is not None


def extensions() -> list[Any]:
    """Return an optional extension for each compilable module.

    They are translated to C if there is a compiler, but not for a source distribution, which has no C.

    ``cythonize`` drops the flag ``optional``, so it is set afterwards.
    """
    sources = {name: INFO["source_of"](name) for name in INFO["compilable_modules"]()} if WANTED else {}
    modules = [
        Extension(name, [str(path.relative_to(HERE))], extra_compile_args=FLAGS)
        for name, path in sources.items()
        if path is not None
    ]
    if not modules or not has_compiler() or "sdist" in sys.argv:
        return modules
    from Cython.Build import cythonize

    built: list[Any] = cythonize(  # type: ignore[no-untyped-call, unused-ignore]
        modules,
        include_path=["src"],
        compiler_directives={
            "language_level": 3,
            "warn.unreachable": False,  # branches for the other way of running are unreachable
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
    """Compiles all modules or none, because compiled modules call each other's C functions."""

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
        failure = f"{len(self.failed)} of {len(self.extensions)} modules could not be compiled ({names})"
        if DEMANDED:
            raise SystemExit(f"{failure}, and POLYWIRE_COMPILE=1 demands all")
        for module in self.extensions:  # compiled modules of an earlier build must not hide newer sources
            source = HERE / "src" / Path(*module.name.split("."))
            for leftover in [*source.parent.glob(f"{source.name}.*.so"), *source.parent.glob(f"{source.name}.*.pyd")]:
                leftover.unlink()
        reason = next(iter(self.failed.values())).strip().splitlines()[-1:]
        print(
            f"\nWARNING: {failure}: {' '.join(reason)}\n"
            "WARNING: polywire will run from its Python sources: everything works, but many times slower."
            " To compile it, install a C compiler and install polywire again (in a checkout: make clean setup).\n",
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
    """Return the extensions of this distribution, or none if one of them does not compile.

    pip asks for the requirements only once, before the build. So commands that report them compile the modules now, and
    the build reuses the results.
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
