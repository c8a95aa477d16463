"""``polywire transaction``: transactional ids, and the state of the latest transaction of each."""

from __future__ import annotations

from polywire.cli.kept import Noun, commands
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode

app = commands(
    Noun(
        word="transaction",
        name="transactional id",
        names="transactional ids",
        delete_help="Delete a transactional id. Its open transaction is aborted and its epoch restarts at 0; producers that "
        "use it must initialize again.",
        example="orders-billing",
        columns=("id", "epoch", "state", "messages", "positions", "idle_ms", "owner"),
        detail="state",
        missing=ErrorCode.TRANSACTION_MISSING,
        listed=PolywireClient.transactions,
        deleted=PolywireClient.delete_transaction,
    )
)
