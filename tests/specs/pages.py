"""The published pages of the protocols, statement by statement: the test that shows each, and intended differences.

A test of ``tests/specs`` names the lines that it shows, with :meth:`Page.says` or, for rows of one shape,
:meth:`Page.rows`. ``make docs`` writes the ledgers in tests/specs/pages from that, each with a table of differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Differs:
    """A difference from a page: the behaviour of the described software, Polywire's behaviour, and the reason."""

    real: str
    ours: str
    why: str


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of a page in our words, its line, and the test that shows it.

    With ``differs``, the test shows what Polywire does instead.
    """

    page: Page
    line: int
    text: str
    test: str
    differs: Differs | None


@dataclass(frozen=True, slots=True)
class Row:
    """One case of a parametrized test: its line, the statement, and the test's arguments."""

    line: int
    text: str
    values: tuple[object, ...]
    differs: Differs | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A page that describes a protocol.

    wire: as in docs/reference/protocols. name: for test names. title: the page and its revision.
    """

    wire: str
    name: str
    title: str

    def says(self, line: int, text: str, differs: Differs | None = None) -> Callable[[Test], Test]:
        """Register the decorated test as the one that shows a line."""

        def register(test: Test) -> Test:
            STATEMENTS.append(Statement(self, line, text, test.__name__, differs))
            return test

        return register

    def rows(self, arguments: str, *rows: Row) -> Callable[[Test], Test]:
        """Run the decorated test for each row, and register it for each row's line."""

        def register(test: Test) -> Test:
            for row in rows:
                self.says(row.line, row.text, row.differs)(test)
            cases = [pytest.param(*row.values, id=f"{self.name}-{row.line}") for row in rows]
            marked: Test = pytest.mark.parametrize(arguments, cases)(test)
            return marked

        return register


STATEMENTS: Final[list[Statement]] = []  # of the loaded modules

CURSUS_JAVA: Final = Page("cursus", "java", "cursus-java v0.1.0 (28a9431), docs/protocol.md")
CURSUS_API: Final = Page("cursus", "api", "cursus 23aeca0 of 20 November 2025, docs/reference/api-reference.md")
FLUX: Final = Page(
    "flux",
    "protocol",
    "the wire's documentation of 19 May 2026 (srajandev98/srajangupta.github.io, a0c5fa6), protocol.md",
)
FLUX_START: Final = Page("flux", "start", "the same, getting-started.md")
FLUX_DEPLOYED: Final = Page("flux", "deployment", "the same, deployment.md")
_FLUX_LATER: Final = (
    "the documentation as published later (srajangupta.com/projects/flux/docs), {}; lines with text, the title first"
)
FLUX_LATER: Final = Page(
    "flux", "later", _FLUX_LATER.format("protocol, as far as a copy could be had: up to its rules")
)
FLUX_REPLICATION: Final = Page("flux", "replication", _FLUX_LATER.format("replication"))
FLUX_DELIVERY: Final = Page("flux", "delivery", _FLUX_LATER.format("delivery semantics"))
FLUX_GROUPS: Final = Page("flux", "groups", _FLUX_LATER.format("group coordinator"))
FLUX_STORAGE: Final = Page("flux", "storage", _FLUX_LATER.format("storage"))
FLUX_PAGES: Final = (
    *(FLUX, FLUX_START, FLUX_DEPLOYED),
    *(FLUX_LATER, FLUX_REPLICATION, FLUX_DELIVERY, FLUX_GROUPS, FLUX_STORAGE),
)
IGGY: Final = Page(
    "iggy",
    "page",
    "Iggy's page on its binary protocol, as of 31 August 2023 (iggy-rs/iggy-docs ae2151fd, docs/specification/binary.md)",
)
KAFKA07: Final = Page(
    "kafka07",
    "page",
    "Apache Kafka 0.7, its wiki on the wire format and its design page on messages; by the numbers of sections in docs/specs/kafka-0.7.md",
)
PAGES: Final = (CURSUS_JAVA, CURSUS_API, *FLUX_PAGES, IGGY, KAFKA07)
