"""Test the documentation site: every page is in the navigation, and links to files that are not on the site become text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from posixpath import normpath

import pytest

from tools.site import LINK, ROOT, Entry, configuration, navigation, site_links, sources


@pytest.mark.parametrize(
    ("source", "page", "text", "expected"),
    [
        ("docs/index.md", "index.md", "[a](develop/python.md#records)", "[a](develop/python.md#records)"),
        ("docs/index.md", "index.md", "[a](../CONTRIBUTING.md)", "[a](project/contributing.md)"),
        ("docs/operate/deploy.md", "operate/deploy.md", "[a](../../SECURITY.md#b)", "[a](../project/security.md#b)"),
        ("CONTRIBUTING.md", "project/contributing.md", "[a](docs/index.md)", "[a](../index.md)"),
        ("docs/index.md", "index.md", "[`a`](../src/polywire/errors.py) [b](#c)", "`a` [b](#c)"),
        ("docs/index.md", "index.md", "[a](https://b.example)", "[a](https://b.example)"),
        ("docs/concepts/a.md", "concepts/a.md", "![a](../assets/a.svg)", "![a](../assets/a.svg)"),
        ("docs/index.md", "index.md", "```\n[a](../x.py)\n```\n", "```\n[a](../x.py)\n```\n"),
        (
            "docs/index.md",
            "index.md",
            "[a\nb](../x.py)\n```\n[c](d)\n```\n[e\nf](../x.py)",
            "a\nb\n```\n[c](d)\n```\ne\nf",
        ),
    ],
)
def test_links_on_the_site(source: str, page: str, text: str, expected: str) -> None:
    assert site_links(text, PurePosixPath(source), PurePosixPath(page)) == expected


def test_links_on_the_site_lead_to_its_pages() -> None:
    pages = {str(page) for _, page in sources()}
    broken = []
    for source, page in sources():
        for match in LINK.finditer(site_links((ROOT / source).read_text("utf-8"), source, page)):
            target = match["target"].partition("#")[0]
            if target.endswith(".md") and "://" not in target and normpath(f"{page.parent}/{target}") not in pages:
                broken.append(f"{source}: {match[0]}")
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    nav = navigation()
    assert {str(page) for _, page in sources()} - set(_pages(nav)) == set()
    assert configuration(nav).startswith("[project]")


def test_the_sections_of_the_home_page_are_the_top_of_the_navigation() -> None:
    sections = [value for entry in navigation() for value in entry.values() if isinstance(value, list)]
    first = [next(iter(section[0].values())) for section in sections]
    folders = ["get-started", "concepts", "develop", "spark", "operate", "migrate", "reference", "internals"]
    assert first == [f"{folder}/index.md" for folder in folders]


def _pages(entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from _pages(value)
