"""The quality report: detected problems, and its page."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from polywire.spark.pipelines.quality import PartitionFacts, ProducerFacts, Quality, page


def report(
    *, missing: int = 0, repeated: int = 0, corrupt: int = 0, expected: int | None = None, size: int = 4_096
) -> Quality:
    partitions = [
        PartitionFacts("", 0, 100, 0, 99, missing, repeated, corrupt, size),
        PartitionFacts("", 1, 0, 0, -1, 0, 0, 0, 0),
    ]
    return Quality(
        title="a<b>", partitions=tuple(partitions),
        producers=(ProducerFacts("p&q", 100, 0, 99, 0, 0),), rate=((10.0, 0, 60), (11.0, 0, 30), (11.0, 1, 10)), interval_s=1.0,
        sizes=((32, 90), (64, 10)), expected=expected,
    )  # fmt: skip


class Balance(HTMLParser):
    """Tracks tags that are opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "line", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "rect"):
            assert self.open.pop() == tag


def test_problems_are_listed() -> None:
    assert report().sound
    assert report(expected=100).sound
    assert str(report(expected=101)).startswith("wrong: 101 records were expected")
    wrong = report(missing=2, repeated=1, corrupt=3, expected=101).problems
    assert wrong == (
        "2 offsets are missing", "1 rows repeat an offset", "3 rows could not be read", "101 records were expected, 100 exist",
    )  # fmt: skip


def test_the_page_is_well_formed_and_escapes_names() -> None:
    for quality in (report(), report(missing=2)):
        balance = Balance()
        balance.feed(page(quality))
        assert balance.open == []
    text = page(report())
    assert "a&lt;b&gt;" in text
    assert "p&amp;q" in text
    assert "each record exists exactly once" in text
    assert "<script" not in text
    assert "2 offsets are missing" in page(report(missing=2))


def test_partitions_of_several_topics_are_distinguished() -> None:
    partitions = (PartitionFacts("a&b", 0, 1, 0, 0, 0, 0, 0, 9), PartitionFacts("c", 0, 2, 0, 1, 0, 0, 0, 9))
    text = page(replace(report(), partitions=partitions))
    assert "<td>a&amp;b/0</td>" in text
    assert "</i>c/0</span>" in text
    assert "<td>0</td>" in page(report())


def test_a_table_without_values_has_no_sizes() -> None:
    assert "Sizes of values" in page(report())
    text = page(report(size=0))
    assert "Sizes of values" not in text
    assert "mean size" not in text
