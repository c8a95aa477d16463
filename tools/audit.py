"""``python -m tools.audit``: ask pip-audit for known vulnerabilities of the locked packages.

It fails for a known vulnerability. Packages that could not be audited, without a network or without advisories, are
listed; with ``--strict`` they are failures, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.locks import FOLDER

LOCKS: Final = ("base", "dev")
SECONDS_MAX: Final = 300
FAILED: Final = 1
NOT_AUDITED: Final = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The packages of a lock: vulnerable ones with their advisories, and those that could not be audited."""

    vulnerable: Sequence[str]
    unknown: Sequence[str]


def verdict_of(report: str) -> Verdict:
    """Parse pip-audit's JSON. Raises ValueError if it has no result."""
    vulnerable, unknown = [], []
    for package in json.loads(report)["dependencies"]:
        if "skip_reason" in package:
            unknown.append(f"{package['name']}: {package['skip_reason']}")
        vulnerable += [f"{package['name']} {package['version']}: {found['id']}" for found in package.get("vulns", ())]
    return Verdict(vulnerable, unknown)


def ask(lock: Path) -> Verdict:
    """Audit one lock."""
    words = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--progress-spinner", "off"]
    words += ["--format", "json", "-r", str(lock)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
        return verdict_of(done.stdout)
    except subprocess.TimeoutExpired:
        return Verdict((), ("everything: no answer in time",))
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Verdict((), (f"everything: {reason}",))


def main(words: Sequence[str]) -> int:
    """Audit every lock; return the exit code."""
    code = 0
    for name in LOCKS:
        verdict = ask(FOLDER / f"{name}.lock")
        for line in verdict.vulnerable:
            sys.stderr.write(f"VULNERABLE {name}.lock {line}\n")
            code = FAILED
        if verdict.unknown:
            sys.stderr.write(
                f"NOT AUDITED {name}.lock, {len(verdict.unknown)} of it; the first: {verdict.unknown[0]}\n"
            )
            code = code or (NOT_AUDITED if "--strict" in words else 0)
        if not verdict.vulnerable and not verdict.unknown:
            sys.stdout.write(f"{name}.lock: nothing known\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
