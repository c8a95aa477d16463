"""Permissions of a user change without the password."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from polywire.cli.main import run
from polywire.cli.usage import EXIT_DONE, EXIT_USAGE


def test_permissions_are_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYWIRE_SERVE_USERS", str(tmp_path / "users"))
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    assert run(["user", "add", "alice", "--permissions", "consume@shop"]) == EXIT_DONE
    assert run(["user", "alter", "alice", "--permissions", "produce@shop"]) == EXIT_DONE
    assert run(["user", "list", "--output", "csv"]) == EXIT_DONE
    assert "alice,False,False,produce@shop" in capsys.readouterr().out
    assert run(["user", "alter", "alice", "--permissions", "all"]) == EXIT_DONE
    assert run(["user", "alter", "alice"]) == EXIT_USAGE
    assert run(["user", "list", "--output", "csv"]) == EXIT_DONE
    found = capsys.readouterr()
    assert "alice,True,False,all" in found.out
    assert "SIGHUP" in found.err
