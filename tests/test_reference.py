"""The reference pages match the code: each is compared with a newly generated one."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from polywire.broker.settings import BrokerSettings, TopicSettings
from polywire.log.settings import LogSettings
from polywire.protocols.flux.context import FluxSettings
from polywire.server.config import WIRES, ServeConfig
from polywire.server.hub import ConnectionLimits
from tests.specs.pages import IGGY
from tools import reference
from tools.client_reference import client_page

WRITTEN = ("glossary.md", "index.md", "spark.md")  # by hand; tests/unit/spark/test_parity.py checks Spark's options


# Every worker collects the tests, and only one generates the pages. Their names are those of test_there_is_no_other_page.
@pytest.mark.parametrize("name", sorted({path.name for path in reference.FOLDER.glob("*.md")} - {*WRITTEN}))
def test_a_page_is_up_to_date(name: str) -> None:
    page = reference.FOLDER / name
    assert page.read_text("utf-8") == reference.pages()[name], "run `make docs`"


def test_the_ledgers_are_up_to_date() -> None:
    there = {path.name: path.read_text("utf-8") for path in reference.LEDGERS.glob("*.md")}
    assert there == reference.ledgers(), "run `make docs`"


def test_the_iggy_specification_explains_each_difference_from_the_page() -> None:
    section = (reference.FOLDER.parent / "specs" / "iggy.md").read_text("utf-8").partition("### Disagreements")[2]
    explained = re.findall(r"^\| (\d+) \| .* \| .* \| .+ \|$", section.partition("\n### ")[0], re.MULTILINE)
    differing = {said.line for said in reference.statements(IGGY) if said.differs is not None}
    assert differing <= {int(line) for line in explained}


def test_there_is_no_other_page() -> None:
    assert {path.name for path in reference.FOLDER.glob("*.md")} == {*reference.pages(), *WRITTEN}


def test_every_protocol_has_a_page() -> None:
    assert {path.stem for path in (reference.FOLDER / "protocols").glob("*.md")} == {*WIRES, "index"}


@pytest.mark.parametrize(
    "settings", [ServeConfig, ConnectionLimits, BrokerSettings, TopicSettings, LogSettings, FluxSettings]
)
def test_every_setting_has_a_meaning(settings: type[Any]) -> None:
    meanings = reference.field_meanings(settings)
    assert [field.name for field in fields(settings) if not meanings.get(field.name)] == []


def test_sentences_after_arguments_are_not_arguments() -> None:
    page = "\n".join(client_page())
    named = re.findall(r"^\* `([^`]*)`: ", page, re.MULTILINE)
    assert not [name for name in named if not re.fullmatch(r"\*{0,2}\w+", name)], "a sentence was taken for an argument"
    close = page.partition("### `Producer.close")[2].partition("\n#")[0]
    assert close.endswith("\n\nRaises the errors of `flush`, after everything is closed.\n")
