"""A table format is a ``TableFormat`` or its name."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.errors import Invalid
from polywire.spark.pipelines import land as land_module
from polywire.spark.pipelines.registry import read_settings, settings_of
from polywire.spark.pipelines.tables import Table, TableFormat


@pytest.mark.parametrize("given", ["delta", TableFormat.DELTA])
def test_a_name_or_a_member(given: TableFormat | str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Table] = []
    monkeypatch.setattr(land_module, "topic_stream", lambda *_, **__: None)
    monkeypatch.setattr(land_module, "into_table", lambda _, table: found.append(table))
    monkeypatch.setattr(land_module, "run_query", lambda *_, **__: None)
    nothing: Any = None
    land_module.land(nothing, "127.0.0.1:1", "orders", "path", "checkpoint", table_format=given)
    assert [table.format for table in found] == [TableFormat.DELTA]


def test_an_unknown_name_is_refused_before_spark_starts() -> None:
    nothing: Any = None
    with pytest.raises(Invalid, match=r"no such table format, did you mean 'delta'.* known=delta,iceberg,parquet"):
        land_module.land(nothing, "127.0.0.1:1", "orders", "path", "checkpoint", table_format="dleta")


def test_the_command_line_accepts_names_only() -> None:
    (setting,) = [one for one in settings_of(land_module.land) if one.name == "table_format"]
    assert setting.kinds == [TableFormat]
    given = {"address": "a", "topic": "t", "path": "p", "checkpoint": "c", "table_format": "dleta"}
    with pytest.raises(Invalid, match=r"parquet\|delta\|iceberg"):
        read_settings(land_module.land, given)
