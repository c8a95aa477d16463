"""Steps of changes to topics with thousands of partitions, for ``sliced.OrderedWork``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from polywire.broker.sliced import Steps
from polywire.broker.topics import Topic
from polywire.errors import Busy, ErrorCode

# partitions to open, trim or drop in one pass of the loop, which takes up to 7 ms; larger changes run in slices
AT_ONCE_MAX: Final = 500


def retry_while_busy(addition: Callable[[], None]) -> Steps:
    """Make an addition to the log, and retry it while the log is busy. Other errors are raised."""
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
    """Return whether changing these topics takes too long for one pass of the loop."""
    return sum([1 + len(topic.partitions) for topic in topics]) > AT_ONCE_MAX
