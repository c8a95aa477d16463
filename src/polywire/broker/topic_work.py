"""Steps of changes to topics with thousands of partitions, for ``sliced.OrderedWork``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from polywire.broker.sliced import Steps
from polywire.broker.topics import Topic
from polywire.errors import Busy, ErrorCode

# partitions that one pass of the loop opens, trims or drops, in up to 7 ms; larger changes run in slices
AT_ONCE_MAX: Final = 500


def retry_while_busy(addition: Callable[[], None]) -> Steps:
    """Add something to the log, retrying while it is busy. Raises any other refusal."""
    while True:
        try:
            addition()
        except Busy as error:
            if error.code is not ErrorCode.BUSY:
                raise
            yield True
        else:
            return


def are_many(topics: Sequence[Topic]) -> bool:
    """Return whether changing them takes longer than one pass of the loop may."""
    return sum([1 + len(topic.partitions) for topic in topics]) > AT_ONCE_MAX
