"""Run the tests that failed in the last run once more, one after the other, if they are few.

``make test`` does this after a run with failures. A test that passes here failed because of a busy machine or a rare
order of events. It is listed as flaky, with the report of its failure above, and is a fault to repair. It does not fail
the run, so that one of 16,000 tests does not hide the results of the others. A test that fails twice does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import pytest

FLAKY_MAX: Final = 3  # more failures than this have one cause, which a second run would hide
LAST_FAILED: Final = Path(".pytest_cache/v/cache/lastfailed")  # pytest writes it at the end of a run


def failed_tests(path: Path = LAST_FAILED) -> list[str]:
    """Return the ids of the tests that failed in the last run; none if pytest stored none."""
    return sorted(json.loads(path.read_text())) if path.exists() else []


class Outcomes:
    """A pytest plugin that records which tests ended, and which of them failed."""

    def __init__(self) -> None:
        self._ended: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record one phase of a test; each test that starts has a teardown."""
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown":
            self._ended.add(report.nodeid)

    def verdict(self, test: str) -> str:
        """Return the result of a test, or of all tests of a module that could not be collected in the first run."""
        ended = {name for name in self._ended if name == test or name.startswith(f"{test}::")}
        if not ended:
            return "FAILED, and could not be run alone"
        return "FAILED, also alone" if ended & self._failed else "FLAKY: failed with other tests, and passed alone"


def main() -> int:
    """Return the exit code of the second run; 1 if there are no or too many failed tests."""
    failed = failed_tests()
    if not failed or len(failed) > FLAKY_MAX:
        return 1
    outcomes = Outcomes()
    code = int(pytest.main(["-p", "no:cacheprovider", *failed], plugins=[outcomes]))
    for test in failed:
        print(f"{outcomes.verdict(test)}: {test}")
    return code


if __name__ == "__main__":
    sys.exit(main())
