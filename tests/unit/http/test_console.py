"""Tests of the console's scripts: imports, and that all of them are served."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from importlib.resources import files

from polywire.http.application import FILES
from tools.screenshots import DOCS, PICTURES

IMPORTED = re.compile(r'^import [^;]* from "\./(\w+\.js)";$', re.MULTILINE)
SCRIPTS = {
    file.name: file.read_text() for file in (files("polywire.http") / "static").iterdir() if file.name.endswith(".js")
}


def test_scripts_have_no_import_cycles() -> None:
    order = list(TopologicalSorter({name: IMPORTED.findall(text) for name, text in SCRIPTS.items()}).static_order())
    assert order[-1] == "console.js", "the page loads everything through it"


def test_every_page_has_a_picture_in_the_documentation() -> None:
    [pages] = re.findall(r"export const views = \{ (.*) \};", SCRIPTS["views.js"])
    names = [page.partition(":")[0] for page in pages.split(", ")]
    shown = {picture.path.split("/")[1].partition("?")[0] or "overview" for picture in PICTURES}
    assert shown == set(names)
    text = (DOCS / "console.md").read_text("utf-8")
    assert set(re.findall(r"\]\((console-[\w-]+\.png)\)", text)) == {picture.file for picture in PICTURES}
    assert {file.name for file in DOCS.glob("console-*.png")} == {picture.file for picture in PICTURES}


def test_every_imported_script_is_served() -> None:
    for name, text in SCRIPTS.items():
        assert len(re.findall(r"^import ", text, re.MULTILINE)) == len(IMPORTED.findall(text)), name
    assert SCRIPTS.keys() == {name for name in FILES if name.endswith(".js")}
