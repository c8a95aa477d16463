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
        forget="Delete a transactional id. Its open transaction is aborted and its epoch restarts at 0; producers that "
        "use it must initialize again.",
        example="orders-billing",
        columns=("id", "epoch", "state", "messages", "positions", "idle_ms", "owner"),
        detail="state",
        missing=ErrorCode.TRANSACTION_MISSING,
        listed=PolywireClient.transactions,
        deleted=PolywireClient.delete_transaction,
    )
)
