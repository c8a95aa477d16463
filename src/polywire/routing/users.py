"""Changes of users, which the first shard makes for all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from polywire.broker.access import Access, new_token
from polywire.broker.users import Principal, User, digest_of
from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.runtime.shards import Shards
from polywire.routing.calls import Method, Router, routed
from polywire.routing.values import VALUES_SHARD


class RoutedUsers:
    """The methods of ``Access`` that change users. Every error of another process is reported to ``done``."""

    __slots__ = ("_router", "local", "router", "shards")

    def __init__(self, router: Router, local: Access) -> None:
        self._router: Final = router
        self.local: Final = local
        self.router: Final = self
        self.shards: Final[Shards] = router.shards

    def shard_with(self, _: object) -> int:
        """See ``calls.Router``."""
        return VALUES_SHARD

    def call(self, shard: int, method: Method, values: Sequence[Any], options: Mapping[str, Any]) -> None:
        """See ``calls.Router``. Connections of the user are closed after ``done`` was called."""
        end_change, done = self.local.begin_change(values[0]), options["done"]

        def completed(result: User | BrokerError) -> None:
            if done is not None:
                done(result)
            end_change()

        try:
            self._router.call(shard, method, values, {**options, "done": completed})
        except BrokerError:
            end_change()
            raise

    add_token = routed("access.add_token", Access.add_token, "user")
    change_password = routed("access.change_password", Access.change_password, "user")
    create_user = routed("access.create_user", Access.create_user, "name")
    delete_token = routed("access.delete_token", Access.delete_token, "user")
    delete_user = routed("access.delete_user", Access.delete_user, "user")
    grant = routed("access.grant", Access.grant, "user")
    set_quota = routed("access.set_quota", Access.set_quota, "user")
    reset_password = routed("access.reset_password", Access.reset_password, "user")
    set_verifiers = routed("access.set_verifiers", Access.set_verifiers, "name")
    update_user = routed("access.update_user", Access.update_user, "user")

    def create_token(
        self, user: User, name: str, expires_at_us: int | None, *, by: Principal | None, done: Completion[User]
    ) -> str:
        """See ``Access.create_token``. The token stays in this process."""
        token = new_token()
        self.add_token(user, name, digest_of(token), expires_at_us, by=by, done=done)
        return token
