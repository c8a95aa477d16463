"""Build the documentation as a static site: ``python -m tools.site [folder]`` or ``make site``.

Guarantees:

* The navigation follows the index pages: docs/index.md links to the index.md of each section, which links to the section's pages.
* Links to files that are not on the site, such as source code, become plain text. Images stay.
* A page without a place in the navigation, or a broken link, fails the build.

Requires zensical (requirements/site.lock).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = PurePosixPath("docs")
PLACE: Final = ROOT / "build" / "site"
PROJECT: Final = PurePosixPath("project")  # where pages of the root are, on the site
TITLE: Final = "Polywire"
LINK: Final = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
HEADING: Final = re.compile(r"^# (.+)$", re.M)
INDEX: Final = "index.md"
COPIED: Final = ("*.png", "*.svg", "*.css")
STYLE: Final = "assets/site.css"
FENCE: Final = "```"

Entry = dict[
    str, "str | list[Entry]"
]  # a title, and its page or its entries; the index of a section is an entry without a title


def page_of(target: str, source: PurePosixPath) -> PurePosixPath | None:
    """Return the page of the site that a link in ``source`` leads to, or None if the site has no such page."""
    path = PurePosixPath(normpath(str(source.parent / target)))
    if path.suffix != ".md" or not (ROOT / path).exists():
        return None
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    return PROJECT / path.name.lower() if path.parent == PurePosixPath(".") else None


def site_links(text: str, source: PurePosixPath, page: PurePosixPath) -> str:
    """Rewrite the links of a page for its location on the site, which is ``page``."""

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        to = page_of(target, source)
        return f"[{match['text']}]({relpath(to, page.parent)}{mark}{anchor})" if to is not None else match["text"]

    parts, fenced = [""], False  # prose and fenced blocks in turn: a link may span lines, but no fence
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith(FENCE):
            fenced = not fenced
            parts.append("")
        parts[-1] += line
    return "".join([part if at % 2 else LINK.sub(link, part) for at, part in enumerate(parts)])


def sources() -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Yield each page, relative to the project's root, with its location on the site."""
    for path in sorted((ROOT / DOCS).rglob("*.md")):
        source = PurePosixPath(path.relative_to(ROOT).as_posix())
        yield source, source.relative_to(DOCS)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        yield PurePosixPath(name), PROJECT / name.lower()


def navigation() -> list[Entry]:
    """Return the home page and one entry for each section that docs/index.md links to.

    A section holds the pages of its folder that its index.md links to, the pages of the project's root, and an entry for each index.md.
    """
    seen = {PurePosixPath(INDEX)}
    return [{"Home": INDEX}, *_entries(PurePosixPath(INDEX), seen)]


def _entries(index: PurePosixPath, seen: set[PurePosixPath]) -> Iterator[Entry]:
    text = (ROOT / DOCS / index).read_text("utf-8")
    targets = [page_of(match["target"].partition("#")[0], DOCS / index) for match in LINK.finditer(text)]
    is_home = index == PurePosixPath(INDEX)
    pages = [page for page in dict.fromkeys(targets) if page is not None and page not in seen]
    sections = {page for page in pages if page.name == INDEX and (not is_home or len(page.parts) == 2)}
    seen |= sections  # before their own links are followed: a section belongs to the first index that links to it
    for page in pages:
        if page in sections:
            yield {title(page): [{"": str(page)}, *_entries(page, seen)]}
        elif not is_home and (page.is_relative_to(PROJECT) or page.is_relative_to(index.parent)):
            seen.add(page)
            yield {title(page): str(page)}


def title(page: PurePosixPath) -> str:
    """Return the first heading of a page."""
    source = page.name.upper().replace(".MD", ".md") if page.is_relative_to(PROJECT) else DOCS / page
    found = HEADING.search((ROOT / source).read_text("utf-8"))
    assert found, f"{page} has no heading"
    return found[1].replace("`", "")


def configuration(nav: list[Entry]) -> str:
    """Return the settings file of zensical. Strings and arrays are written as JSON, which is valid TOML."""
    inline = ", ".join(_table(entry) for entry in nav)
    return (
        f"[project]\nsite_name = {json.dumps(TITLE)}\ndocs_dir = 'pages'\nsite_dir = 'html'\n"
        f"use_directory_urls = false\nextra_css = [{json.dumps(STYLE)}]\nnav = [{inline}]\n"
        "[project.theme]\nfeatures = ['navigation.indexes', 'navigation.top', 'content.code.copy', 'search.highlight']\n"
        "font = false\n"
        "[[project.theme.palette]]\nmedia = '(prefers-color-scheme: light)'\nscheme = 'default'\n"
        "[[project.theme.palette]]\nmedia = '(prefers-color-scheme: dark)'\nscheme = 'slate'\n"
    )


def _table(entry: Entry) -> str:
    [(name, value)] = entry.items()
    inner = json.dumps(value) if isinstance(value, str) else f"[{', '.join(_table(page) for page in value)}]"
    return f"{{ {json.dumps(name)} = {inner} }}" if name else inner


def build(place: Path) -> None:
    """Empty a folder and write the site to it. Raises CalledProcessError if zensical fails."""
    shutil.rmtree(place, ignore_errors=True)
    for source, page in sources():
        target = place / "pages" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(site_links((ROOT / source).read_text("utf-8"), source, page), "utf-8")
    for file in (path for pattern in COPIED for path in (ROOT / DOCS).rglob(pattern)):
        target = place / "pages" / file.relative_to(ROOT / DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    (place / "zensical.toml").write_text(configuration(navigation()), "utf-8")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=place, check=True)


def main(arguments: Sequence[str]) -> None:
    """Build the site and print its location."""
    place = Path(arguments[0]).resolve() if arguments else PLACE
    build(place)
    print(f"the site is in {place / 'html'}: open index.html")


if __name__ == "__main__":
    main(sys.argv[1:])
