"""``polywire transaction``: transactional ids that the broker remembers.

Promises, must not know: as ``cli.kept``.
"""

from __future__ import annotations

from polywire.cli.kept import Noun, commands
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode

app = commands(
    Noun(
        word="transaction",
        name="transactional id",
        names="transactional ids",
        help="List and delete transactional ids: who may hold transactions, and how the latest one stands. The broker remembers an id for"
        " seven days after its last use.",
        forget="Forget a transactional id: an open transaction is aborted, and epochs count from 0 again. Whoever still uses it must begin"
        " anew.",
        example="orders-billing",
        columns=("id", "epoch", "state", "messages", "positions", "idle_ms", "owner"),
        detail="state",
        missing=ErrorCode.TRANSACTION_MISSING,
        listed=PolywireClient.transactions,
        deleted=PolywireClient.delete_transaction,
    )
)
