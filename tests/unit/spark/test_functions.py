"""Where a text is not JSON: the position that the reason for a rejected value names."""

from __future__ import annotations

import json
import re
import time
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.spark.functions import READABLE

LONG: Final = 200_000
SECONDS_MAX: Final = 5.0  # on a busy machine; a quadratic search would take hours
VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def end(text: str) -> int:
    found = re.match(READABLE, text)
    assert found is not None
    return found.end()


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("{broken", 1),
        ('{"a":yes}', 5),
        ('{"a" 1}', 5),
        ('{"a":1 "b":2}', 7),
        ('{"a":1,}', 6),
        ('{"a":01}', 6),
        ('{"a":,}', 5),
        ('{"a": "cut off', 6),
        ('{"a": "\\x"}', 6),
        ('{"a":', 5),
        ("{'single': 1 2}", 13),  # Spark accepts single quotes
    ],
)
def test_the_position_is_that_of_the_first_wrong_token(text: str, position: int) -> None:
    assert end(text) == position


@given(VALUES)
def test_json_is_readable_to_its_end(value: object) -> None:
    for text in (json.dumps({"a": value}), json.dumps({"a": value}, ensure_ascii=False, indent=1)):
        assert end(text) == len(text)


@given(VALUES, st.data())
def test_the_position_is_not_after_the_error(value: object, data: st.DataObject) -> None:
    text = json.dumps({"a": value})
    cut = data.draw(st.integers(1, len(text) - 1))
    assert end(text[:cut] + "!") <= cut or '"' in text[:cut], "the rest may be inside a string"


@pytest.mark.parametrize("part", ["[", "1,", '"a",', '"\\\\n', "\\\\n", "1", " "])
@pytest.mark.parametrize("start", ['{"a":', '{"a":"', '{"a":['])
def test_hostile_text_is_searched_in_linear_time(start: str, part: str) -> None:
    begun = time.monotonic()
    end(start + part * LONG)
    assert time.monotonic() - begun < SECONDS_MAX
