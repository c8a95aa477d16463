"""Steps of changes of topics with thousands of partitions, for ``sliced.OrderedWork``.

Promises: what the log is too busy for now is done as soon as it is not. Must not know: what a change is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from polywire.broker.sliced import Steps
from polywire.broker.topics import Topic
from polywire.errors import Busy, ErrorCode

AT_ONCE_MAX: Final = 500  # partitions that one pass of the loop opens, trims or drops, in up to 7 ms; more go in slices


def retry_while_busy(addition: Callable[[], None]) -> Steps:
    """Add something to the log, again and again while it is busy. Raises what it refuses for another reason."""
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
    """Whether they take longer to change than one pass of the loop has time for."""
    return sum([1 + len(topic.partitions) for topic in topics]) > AT_ONCE_MAX
