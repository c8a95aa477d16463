"""LOCATE of the `polywire` protocol: return the byte ranges of segments that contain given records.

Clients that can read the broker's files or bucket use it (spec: polywire#reading-sealed-segments-directly). LOCATE
returns only the locations of records that FETCH would send.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from polywire.errors import BrokerError
from polywire.log.base import Located
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import find_partition
from polywire.protocols.polywire.fetch import check_identity
from polywire.protocols.polywire.messages import Verb
from polywire.protocols.polywire.replies import ReplyOwner

NOTHING: Final = messages.Located("", b"", [], more=False)


def locate(session: ReplyOwner, correlation: int, request: messages.Locate, _: memoryview) -> None:
    """LOCATE: return the segment files with the requested records.

    Empty if the client may not get the paths of files. Raises BrokerError if it is rejected immediately.
    """
    broker = session.broker
    partition = find_partition(broker, request.name, request.partition)
    check_identity(partition, request)
    end = request.offset_end if request.offset_end >= 0 else None
    found = broker.locate(partition, request.offset, then=partial(_respond, session, correlation), offset_end=end)
    if isinstance(found, Located):
        session.answer(Verb.LOCATE, correlation, _encoded(session, found))
    else:
        session.owe()


def _respond(session: ReplyOwner, correlation: int, found: Located | BrokerError) -> None:
    if isinstance(found, BrokerError):
        session.respond_error(Verb.LOCATE, correlation, found)
    else:
        session.respond(Verb.LOCATE, correlation, _encoded(session, found))


def _encoded(session: ReplyOwner, found: Located) -> messages.Located:
    """Encode the locations, or none if the client may not get them.

    The URL of a bucket is not secret: clients need their own credentials to read it.
    """
    root = found.root
    if root is None or (root.is_on_a_machine and not session.admission.sees_files()):
        return NOTHING
    runs = [messages.SealedRange(r.blob, r.start, r.stop, r.first_offset, r.next_offset) for r in found.runs]
    return messages.Located(root.address, root.mark, runs, found.more)
