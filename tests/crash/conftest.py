"""Fixtures of the crash tests."""

from __future__ import annotations

import pytest

from tests.crash.disk import JournalDisk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> JournalDisk:
    """Record what reaches the disk of journals that the test itself opens."""
    return JournalDisk(monkeypatch)
