"""Steps of changes of topics with thousands of partitions, for ``sliced.OrderedWork``.

Promises: what the log has no room for now is done as soon as it has. Must not know: what a change is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from polywire.broker.sliced import Steps
from polywire.errors import Busy, ErrorCode

AT_ONCE_MAX: Final = 500  # partitions that one turn opens, trims or drops, in up to 7 ms; more go in slices


def when_there_is_room(addition: Callable[[], None]) -> Steps:
    """Add something to the log, as soon as it takes it. Raises what it refuses for another reason than that it has no room now."""
    while True:
        try:
            addition()
        except Busy as error:
            if error.code is not ErrorCode.BUSY:
                raise
            yield True
        else:
            return
