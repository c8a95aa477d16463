"""Expectations: SQL conditions that rows should meet, as in Spark's declarative pipelines.

Rows that do not meet one are kept, dropped, or stop the job. In each case they are counted by the name of the
expectation. A condition whose result is null is not met. Rows that have no fields are not checked: those that could not
be parsed, and deletions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from polywire.errors import ErrorCode, Invalid
from polywire.spark.functions import CORRUPT
from polywire.spark.progress import UNMET

EXPECTATIONS_MAX: Final = 100  # each costs an expression for every row
_FORM: Final = "NAME: CONDITION; NAME: CONDITION"

Given: TypeAlias = Mapping[str, str] | str | None
Expect = Annotated[Given, f"{_FORM}; count rows that do not meet a condition"]
ExpectOrDrop = Annotated[Given, f"{_FORM}; count and drop rows that do not meet a condition"]
ExpectOrFail = Annotated[Given, f"{_FORM}; stop at the first row that does not meet a condition"]


class Expectations:
    """The expectations of a job.

    Args:
        keep: conditions by name; rows that do not meet them are only counted.
        drop: the same; such rows are dropped.
        fail: the same; the job fails at the first such row.

    Raises:
        Invalid: INVALID_REQUEST: a text has another form, two have one name, or there are too many.
    """

    def __init__(self, keep: Given = None, drop: Given = None, fail: Given = None) -> None:
        self._drop: Final = _read(drop)
        self._fail: Final = _read(fail)
        kept = _read(keep)
        self._all: Final = {**kept, **self._drop, **self._fail}
        if len(self._all) < len(kept) + len(self._drop) + len(self._fail):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"two expectations have the same name known={','.join(self._all)}")
        if len(self._all) > EXPECTATIONS_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"too many expectations limit={EXPECTATIONS_MAX}")

    def applied(self, rows: DataFrame, *, deleted: Column | None = None) -> DataFrame:
        """Return the rows without those to drop. ``deleted`` is the condition for deletions; None if there are none."""
        checked = self._checked(rows, deleted)
        for condition in self._drop.values():
            checked = checked.where(~_is_unmet(checked, condition, deleted))
        return checked

    def marked(self, rows: DataFrame, *, deleted: Column | None = None) -> DataFrame:
        """Return the rows. Those to drop have the reason in the column ``_corrupt``."""
        checked = self._checked(rows, deleted)
        if not self._drop:
            return checked
        reasons = [
            f.when(_is_unmet(checked, condition, deleted), f"the expectation {name!r} is not met: {condition}")
            for name, condition in self._drop.items()
        ]
        return checked.withColumn(CORRUPT, f.coalesce(CORRUPT, *reasons))

    def _checked(self, rows: DataFrame, deleted: Column | None) -> DataFrame:
        """Count the rows that fail a condition, by its name. Fail the query if the condition is one of ``expect_or_fail``."""
        if not self._all:
            return rows
        counts = [f.count_if(_is_unmet(rows, condition, deleted)).alias(name) for name, condition in self._all.items()]
        checked = rows.observe(UNMET, *counts)
        for name, condition in self._fail.items():
            message = f.concat(f.lit(f"the expectation {name!r} is not met: {condition}"), *_location(rows))
            fails = f.raise_error(message).cast("boolean")
            checked = checked.where(f.when(_is_unmet(rows, condition, deleted), fails).otherwise(True))
        return checked


def _is_unmet(rows: DataFrame, condition: str, deleted: Column | None) -> Column:
    unmet = ~f.coalesce(f.expr(condition).cast("boolean"), f.lit(False))
    unmet = unmet if deleted is None else unmet & ~deleted
    return unmet & f.col(CORRUPT).isNull() if CORRUPT in rows.columns else unmet


def _location(rows: DataFrame) -> list[Column]:
    """Return the parts of a message that name the record."""
    names = [name for name in ("topic", "partition", "offset") if f"_{name}" in rows.columns]
    return [f.concat(f.lit(f" {name}="), f.col(f"_{name}").cast("string")) for name in names]


def _read(given: Given) -> dict[str, str]:
    """Return conditions by name."""
    if not isinstance(given, str):
        return dict(given or {})
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in given.split(";"))):
        name, colon, condition = (word.strip() for word in part.partition(":"))
        if not (name and colon and condition):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"an expectation has another form (use {_FORM}) got={part!r}")
        if name in found:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"two expectations have the same name name={name!r}")
        found[name] = condition
    return found
