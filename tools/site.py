"""``python -m tools.site [place]``: the documentation as a site of static pages (``make site``).

Promises: the navigation is what docs/index.md says; every page of docs is in it, and the pages at the root of the project that are linked;
a link that leads to no page of the site is text there, since sources are not part of it. Anything that does not fit together fails. Needs
zensical (requirements/site.lock). Must not know: what the pages say.
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
LINK: Final = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
SECTION: Final = re.compile(r"^\* \*\*(?P<name>[^*]+)\*\*(?P<text>.*?)(?=^\* |\Z)", re.M | re.S)
FENCE: Final = "```"

Navigation = list[dict[str, str | list[dict[str, str]]]]


def page_of(target: str, source: PurePosixPath) -> PurePosixPath | None:
    """The place on the site of what a link in ``source`` (below the project's root) leads to; None where the site does not have it."""
    path = PurePosixPath(normpath(str(source.parent / target)))
    if path.suffix != ".md" or not (ROOT / path).exists():
        return None
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    return PROJECT / path.name.lower() if path.parent == PurePosixPath(".") else None


def site_links(text: str, source: PurePosixPath, page: PurePosixPath) -> str:
    """A page's text with links as they are on the site, where it is ``page``."""

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        to = page_of(target, source)
        return f"[{match['text']}]({relpath(to, page.parent)}{mark}{anchor})" if to is not None else match["text"]

    lines, fenced = [], False
    for line in text.splitlines(keepends=True):
        fenced ^= line.lstrip().startswith(FENCE)
        lines.append(line if fenced else LINK.sub(link, line))
    return "".join(lines)


def sources() -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Each page below the project's root, and where it is on the site."""
    for path in sorted((ROOT / DOCS).rglob("*.md")):
        source = PurePosixPath(path.relative_to(ROOT).as_posix())
        yield source, source.relative_to(DOCS)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        yield PurePosixPath(name), PROJECT / name.lower()


def navigation(index: str) -> Navigation:
    """The sections of docs/index.md, and the pages that each names."""
    found: Navigation = [{"Home": "index.md"}]
    seen = {"index.md"}
    for section in SECTION.finditer(index):
        pages: list[dict[str, str]] = []
        for match in LINK.finditer(section["text"]):
            page = page_of(match["target"].partition("#")[0], DOCS / "index.md")
            if page is not None and str(page) not in seen:
                seen.add(str(page))
                pages.append({_capital(match["text"]): str(page)})
        if pages:
            found.append({section["name"]: pages})
    return found


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def configuration(nav: Navigation) -> str:
    """What zensical reads. Values are written as JSON, which TOML's strings and arrays are, too."""
    inline = ", ".join(_table(entry) for entry in nav)
    return (
        f"[project]\nsite_name = {json.dumps(TITLE)}\ndocs_dir = 'pages'\nsite_dir = 'html'\n"
        f"use_directory_urls = false\nnav = [{inline}]\n"
        "[project.theme]\nfeatures = ['navigation.indexes', 'navigation.top', 'content.code.copy', 'search.highlight']\n"
        "font = false\n"
        "[[project.theme.palette]]\nmedia = '(prefers-color-scheme: light)'\nscheme = 'default'\n"
        "[[project.theme.palette]]\nmedia = '(prefers-color-scheme: dark)'\nscheme = 'slate'\n"
    )


def _table(entry: dict[str, str | list[dict[str, str]]]) -> str:
    [(name, value)] = entry.items()
    inner = json.dumps(value) if isinstance(value, str) else f"[{', '.join(_table(dict(page)) for page in value)}]"
    return f"{{ {json.dumps(name)} = {inner} }}"


def build(place: Path) -> None:
    """Write the site below a folder, which is emptied first. Raises CalledProcessError, and ValueError for a site that is not whole."""
    shutil.rmtree(place, ignore_errors=True)
    for source, page in sources():
        target = place / "pages" / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(site_links((ROOT / source).read_text("utf-8"), source, page), "utf-8")
    for picture in (ROOT / DOCS).rglob("*.png"):
        target = place / "pages" / picture.relative_to(ROOT / DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, target)
    nav = navigation((ROOT / DOCS / "index.md").read_text("utf-8"))
    (place / "zensical.toml").write_text(configuration(nav), "utf-8")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=place, check=True)


def main(arguments: Sequence[str]) -> None:
    """Build, and say where it is."""
    place = Path(arguments[0]).resolve() if arguments else PLACE
    build(place)
    print(f"the site is in {place / 'html'}: open index.html")


if __name__ == "__main__":
    main(sys.argv[1:])
