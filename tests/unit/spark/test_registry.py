"""Named pipelines, and settings parsed from text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest

from polywire.errors import Invalid
from polywire.spark.pipelines.registry import PIPELINES, kind_name, pipeline, read_settings, settings_of


class Colour(Enum):
    RED = "red"


def job(
    spark: object,
    topic: Annotated[str, "what to read"],
    count: int | None = None,
    speed: float = 1.5,
    wait: bool = True,
    place: str | Path | None = None,
    names: Sequence[str] = (),
    colour: Colour = Colour.RED,
    parse: Callable[[Any], Any] | str | None = None,
    on_progress: object = None,
) -> None:
    """A pipeline with settings of many types."""


def test_settings_are_parsed_by_their_types() -> None:
    given = {
        "topic": "t",
        "count": "3",
        "speed": "2",
        "wait": "false",
        "place": "/x",
        "names": "a, b",
        "colour": "red",
        "parse": "text",
    }
    read = read_settings(job, given)
    assert read == {
        "topic": "t", "count": 3, "speed": 2.0, "wait": False, "place": "/x", "names": ("a", "b"), "colour": Colour.RED, "parse": "text",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "missing (use --set topic="),
        ({"topic": "t", "cuont": "3"}, "did you mean 'count'"),
        ({"topic": "t", "count": "many"}, "setting needs whole number setting=count"),
        ({"topic": "t", "wait": "yes"}, "setting needs true|false"),
        ({"topic": "t", "colour": "blue"}, "setting needs red"),
    ],
)
def test_errors_suggest_the_intended_setting(given: dict[str, str], reason: str) -> None:
    with pytest.raises(Invalid) as caught:
        read_settings(job, given)
    assert reason in caught.value.message


def test_settings_are_described() -> None:
    reported = {setting.name: setting for setting in settings_of(job)}
    assert (reported["topic"].meaning, reported["topic"].required, reported["topic"].default) == (
        "what to read",
        True,
        None,
    )
    assert (reported["wait"].default, reported["colour"].default, reported["count"].default) == ("true", "red", None)
    assert [kind_name(kind) for kind in reported["names"].kinds] == ["a,b,…"]
    assert set(reported) == {"topic", "count", "speed", "wait", "place", "names", "colour", "parse"}


@pytest.mark.parametrize("name", [known.name for known in PIPELINES])
def test_every_setting_of_every_pipeline_is_described(name: str) -> None:
    settings = settings_of(pipeline(name).load())
    assert settings
    assert not [setting.name for setting in settings if not setting.meaning or not setting.kinds]


def test_an_unknown_pipeline_suggests_the_intended_one() -> None:
    with pytest.raises(Invalid, match="did you mean 'quality'"):
        pipeline("qualty")
