"""``python -m tools.english [path ...]``: report wording that the writing rules ban, and sentences that are too long.

The rules are in CONTRIBUTING.md. The list is a floor: text that passes it can still be hard to read. In Python files comments, strings and
names are checked; in Markdown everything but code and quotations.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
SENTENCE_WORDS: Final = 25  # the limit of the writing rules
SUBJECT_CHARACTERS: Final = 72  # `git log --oneline` fits 80 columns

_WORDS: Final = ("told", "anew", "nobody", "somebody", "whoever")
_PHRASES: Final = (r"(?<!there )is\s+none", r"hangs?\s+up", r"hung\s+up", r"stands\s+by", r"left\s+out")
WORDS: Final = re.compile(r"(?<![A-Za-z])(?:" + "|".join(_WORDS) + r")(?![A-Za-z])", re.IGNORECASE)
PHRASES: Final = re.compile(r"\b(?:" + "|".join(phrase for phrase in _PHRASES) + r")\b")
HEADLESS: Final = re.compile(
    r"(?:^|(?<=[.:;]\s))(?:Who|What)\s(?!(?:is|are|was|were|does|do|did|can|to)\b[^.]*\?)[^.?]*\.", re.MULTILINE
)
"""A sentence that begins with "Who" or "What" without being a question, such as "What is sealed stays."."""

_CODE: Final = re.compile(r"``[^`]*``|`[^`\n]*`")
_QUOTED: Final = re.compile(r"“[^”]*”|\"[^\"\n]*\"")
_FENCE: Final = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)", re.MULTILINE | re.DOTALL)
_QUOTATION: Final = re.compile(r"^\s*>.*$", re.MULTILINE)
_SENTENCE: Final = re.compile(r"[A-Z][^.!?|]*[.!?](?=\s|$)")


class Finding(NamedTuple):
    """One banned wording: where it is and the text that was found."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.text}"


def prose_of_markdown(text: str) -> str:
    """Return a page with code and quotations blanked out; lines keep their numbers."""
    for pattern in (_FENCE, _QUOTATION, _CODE, _QUOTED):
        text = pattern.sub(_blank, text)
    return text


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment and string of a module, code spans blanked out."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _CODE.sub(_blank, token.string.lstrip("# "))
        elif token.type == tokenize.STRING:
            try:
                value = ast.literal_eval(token.string)
            except (SyntaxError, ValueError):  # an f-string
                value = token.string
            if isinstance(value, str):
                yield token.start[0], _CODE.sub(_blank, value)


def findings(path: Path) -> list[Finding]:
    """Return the banned wordings of one Markdown page or Python module, in the order of lines."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        prose = prose_of_markdown(text)
        found = [finding for pattern in (WORDS, PHRASES, HEADLESS) for finding in _matches(path, 1, prose, pattern)]
    else:
        found = list(_matches(path, 1, text, WORDS))  # names count, too: people read them
        for line, string in prose_of_python(text):
            found.extend(
                finding for pattern in (PHRASES, HEADLESS) for finding in _matches(path, line, string, pattern)
            )
    return sorted(found, key=lambda finding: finding.line)


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of words and the text of each sentence of a page, or of a module's comments and docstrings."""
    text = path.read_text("utf-8")
    pieces = [prose_of_markdown(text)] if path.suffix == ".md" else [string for _, string in prose_of_python(text)]
    for piece in pieces:
        for paragraph in re.split(r"\n\s*\n|^\s*(?:[*+-]|\d+\.|\|)\s", piece, flags=re.MULTILINE):
            for match in _SENTENCE.finditer(" ".join(paragraph.split())):
                yield len(match[0].split()), match[0]


def readable_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the pages and modules among and below ``paths``."""
    for path in paths:
        if path.is_dir():
            yield from sorted(found for suffix in ("*.md", "*.py") for found in path.rglob(suffix))
        else:
            yield path


def _matches(path: Path, first: int, text: str, pattern: re.Pattern[str]) -> Iterator[Finding]:
    for match in pattern.finditer(text):
        yield Finding(path, first + text.count("\n", 0, match.start()), " ".join(match[0].split())[:100])


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def main() -> None:
    """Print the findings below the given paths, then how many sentences are longer than the rule allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[2].partition("\n")[0].strip())
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "src", ROOT / "docs", ROOT / "tests"])
    parser.add_argument("--sentences", type=int, default=0, metavar="N", help="print the N longest sentences, too")
    arguments = parser.parse_args()
    lengths: list[tuple[int, str, Path]] = []
    count = 0
    for path in readable_files([path.resolve() for path in arguments.paths]):
        for finding in findings(path):
            print(finding)
            count += 1
        lengths.extend((words, sentence, path) for words, sentence in sentences(path))
    long = sum(words > SENTENCE_WORDS for words, _, _ in lengths)
    for words, sentence, path in sorted(lengths, reverse=True)[: arguments.sentences]:
        print(f"{words} words: {path.name}: {sentence}")
    print(f"{count} banned wordings; {long} of {len(lengths)} sentences have more than {SENTENCE_WORDS} words")


if __name__ == "__main__":
    main()
