"""Every test run reports which modules run compiled, and how many tests were skipped.

A run never tests compiled code that is older than its source.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from itertools import chain, zip_longest

import pytest
from hypothesis import HealthCheck, settings

from polywire.build_info import describe, stale_modules

YOUNG_MAX = 20_000  # new objects before a garbage collection
WAITING = ("tests/crash/", "tests/histories/")

# How long an example takes depends on the machine's load, so there is no deadline.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


# A worker holds hundreds of thousands of objects of tests and libraries until its end. With Python's own thresholds, it
# spent a tenth of its time on visiting them again. They are frozen before the first test.
gc.disable()

os.environ["POLYWIRE_CONTEXT"] = ""  # the contexts of the user who runs the tests are not used


def pytest_configure(config: pytest.Config) -> None:
    if stale := stale_modules():
        raise pytest.UsageError(
            f"compiled modules are older than their source: run `make build` modules={','.join(stale)}"
        )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(YOUNG_MAX)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long tests first, so that all workers end together, and mix busy with waiting tests."""
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    busy = [name for name, held in modules.items() if any(item.get_closest_marker("spark") for item in held)]
    waiting = [name for name in modules if name.startswith(WAITING) and name not in busy]
    first = [name for pair in zip_longest(busy, waiting) for name in pair if name is not None]
    items[:] = chain.from_iterable(modules[name] for name in dict.fromkeys([*first, *modules]))


def pytest_report_header(config: pytest.Config) -> list[str]:
    asked = " (POLYWIRE_PURE=1)" if os.environ.get("POLYWIRE_PURE") == "1" else ""
    return [describe() + asked]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "?" for report in skipped)
    terminalreporter.write_line(f"ran {describe()}")
    terminalreporter.write_line(f"skipped tests: {len(skipped)}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} × {reason.removeprefix('Skipped: ')}")
