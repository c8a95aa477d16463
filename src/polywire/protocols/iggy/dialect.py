"""A table of the differences between the dialects of Iggy's binary protocol (spec: iggy#dialects, iggy#timeline).

Every difference between dialects is a field of ``Dialect``. Other modules check these fields instead of comparing
dialects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from polywire.protocols.iggy import encoder


def packed(major: int, minor: int, patch: int = 0) -> int:
    """Return a protocol version as logins since protocol version D3 encode it: ten bits for each number."""
    return major << 20 | minor << 10 | patch


@dataclass(frozen=True, slots=True)
class Dialect:
    """One version of the Iggy protocol, and its differences from others.

    Attributes:
        one_based: ids and partitions count from 1.
        normalises: names are lower-cased and their white space is replaced by dots.
        has_login: clients log in.
        ident_consumers: a consumer is a kind and an identifier, instead of a kind and a number.
        named_groups: groups have a name.
        topic_settings: a topic's additional fields. 0: expiry in seconds; 1: also size and replication; 2: also
            compression; 3: expiry in microseconds; 4: settings in options.
        chosen_ids: create requests contain an id.
        auto_ids: with the id 0, the client asks the broker to choose an id.
        optional_partition: a partition is encoded as a flag and a number.
        returns_created: replies to create requests describe the created resource.
        empty_when_missing: the reply to a request for a missing resource is a success without a payload.
        batched: messages follow metadata and an index, or are in frames.
        framed: each request begins with a header of 256 bytes.
        protocols: the protocol versions with which clients log in, if ``framed``.
        server_version: version of Iggy's own server with this dialect, as reported to clients.
        contexts: polls, routes and topics contain the incarnation numbers of partitions; streams and users have two
            blocks of options.
        member_lists: each partition in a topic's description lists the nodes that store it.
        message_head: layout of sent messages, see ``decoder``.
        form: layout of polled messages, see ``encoder``.
    """

    name: str
    one_based: bool = True
    normalises: bool = True
    has_login: bool = True
    ident_consumers: bool = True
    named_groups: bool = True
    topic_settings: int = 0
    chosen_ids: bool = True
    auto_ids: bool = True
    optional_partition: bool = False
    returns_created: bool = False
    empty_when_missing: bool = False
    batched: bool = False
    framed: bool = False
    protocols: range = range(0)
    server_version: str = ""
    contexts: bool = False
    member_lists: bool = False
    message_head: int = 24
    form: int = encoder.FLAT

    @property
    def option_blocks(self) -> int:
        """Number of option blocks that the encoding of a stream or a user has."""
        return int(self.framed) + int(self.contexts)

    @property
    def base(self) -> int:
        """The number of the first stream, topic and partition: 0 or 1. The broker's numbers begin with 0."""
        return 1 if self.one_based else 0


# Each dialect is defined by its differences from the one before.
D0: Final = Dialect("0.0", has_login=False, ident_consumers=False, named_groups=False, auto_ids=False)
D1A: Final = replace(D0, name="0.1.0", has_login=True, ident_consumers=True, named_groups=True)
D1B: Final = replace(D1A, name="0.1", topic_settings=1, auto_ids=True)
D1C: Final = replace(D1B, name="0.4", topic_settings=2)
D1D: Final = replace(D1C, name="0.6", topic_settings=3, returns_created=True, empty_when_missing=True)
D2A: Final = replace(D1D, name="0.7", normalises=False, batched=True, message_head=56, form=encoder.D2A)
D2B: Final = replace(D2A, name="0.8", one_based=False, chosen_ids=False, optional_partition=True, form=encoder.D2B)
D2C: Final = replace(D2B, name="0.10", message_head=64, form=encoder.D2C)
D3: Final = replace(
    D2C,
    name="vsr",
    topic_settings=4,
    framed=True,
    protocols=range(packed(0, 11), packed(0, 12)),
    server_version="0.9.0",
    message_head=48,
    form=encoder.D3,
)
D4A: Final = replace(
    D3, name="vsr-0.12", protocols=range(packed(0, 12), packed(0, 12, 2)), server_version="0.10.0", contexts=True
)
D4B: Final = replace(D4A, name="vsr-0.12.2", protocols=range(packed(0, 12, 2), packed(0, 12, 3)), member_lists=True)

OLD: Final = (
    D1C,
    D1B,
    D1A,
    D0,
)  # dialects whose login has no version, in the order in which they are tried (spec: iggy#recognising-the-dialect)
NEW: Final = (D2C, D2B, D2A, D1D)  # dialects whose login has a version
VERSIONS: Final = {"0.5": D1D, "0.6": D1D, "0.7": D2A, "0.8": D2B, "0.9": D2C, "0.10": D2C}
FRAMED: Final = (D3, D4A, D4B)
DIALECTS: Final = (D0, D1A, D1B, D1C, D1D, D2A, D2B, D2C, *FRAMED)
