"""Builds the compiled modules; everything else about the distribution is in pyproject.toml.

Promises: a missing or broken C compiler costs speed, never the installation, and is said once.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
INFO = runpy.run_path(str(HERE / "src" / "polywire" / "build_info.py"), run_name="build_info")
# Loads through casted pointers are how the hot loops read words: no strict aliasing, then.
# What a C compiler has to say of generated C helps nobody who installs this.
FLAGS = ["/O2"] if sys.platform == "win32" else ["-O3", "-g0", "-fno-strict-aliasing", "-w"]


def extensions() -> list[Any]:
    """One extension per compilable module, each optional: ``cythonize`` drops that flag, so it is set afterwards."""
    sources = {name: INFO["source_of"](name) for name in INFO["compilable_modules"]()}
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


setup(ext_modules=extensions(), cmdclass={"build_ext": ForgivingBuild})
