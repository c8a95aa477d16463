"""Supply chain: the bill of materials lists every locked package, and the audit fails for known vulnerabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import audit, bill_of_materials
from tools.locks import FOLDER, read_lock


def test_the_bill_lists_every_installed_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for output in (first, second):
        bill_of_materials.main(output)
    assert first.read_bytes() == second.read_bytes()
    found = json.loads(first.read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    names = {made["name"] for made in found["components"]}
    assert {"argon2-cffi", "msgspec", "structlog", "uvloop"} <= names
    assert all(made["externalReferences"][0]["hashes"] for made in found["components"])
    refs = [made["bom-ref"] for made in found["components"]]
    assert len(set(refs)) == len(refs)
    assert found["dependencies"][0]["dependsOn"] == refs
    assert "components" in capsys.readouterr().out


@pytest.mark.parametrize("lock", sorted(FOLDER.rglob("*.lock")), ids=lambda path: path.stem)
def test_every_lock_can_be_read_and_has_hashes(lock: Path) -> None:
    pins = read_lock(lock)
    assert pins
    assert all(pin.hashes for pin in pins)


def test_a_line_without_a_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.write_text("something>=1\n")
    with pytest.raises(ValueError, match="line=1"):
        read_lock(path)


REPORT = {
    "dependencies": [
        {"name": "good", "version": "1", "vulns": []},
        {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1"}]},
        {"name": "odd", "skip_reason": "not found"},
    ]
}


def test_verdicts_of_an_audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = audit.verdict_of(json.dumps(REPORT))
    assert (verdict.vulnerable, verdict.unknown) == (["bad 2: PYSEC-1"], ["odd: not found"])
    monkeypatch.setattr(audit, "ask", lambda lock: audit.Verdict((), ("everything: no network",)))
    assert audit.main([]) == 0
    assert "NOT AUDITED base.lock" in capsys.readouterr().err
    assert audit.main(["--strict"]) == audit.NOT_AUDITED
    monkeypatch.setattr(audit, "ask", lambda lock: verdict)
    assert audit.main([]) == audit.FAILED
    monkeypatch.setattr(audit, "ask", lambda lock: audit.Verdict((), ()))
    assert audit.main(["--strict"]) == 0
