"""The endpoints for quotas of users and client ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from polywire.broker.access import Access
from polywire.broker.broker import Broker
from polywire.broker.client_quotas import KINDS, QUOTAS_MAX, Entity, Quota, parse_rate
from polywire.broker.permissions import Action
from polywire.errors import ErrorCode, Invalid
from polywire.http.encoding import Listing, Slices
from polywire.http.endpoints import ApiCall, Endpoint
from polywire.http.guard import completing


class QuotaEndpoints:
    """The HTTP API's endpoints for quotas."""

    def __init__(self, broker: Broker, changes: Access) -> None:
        """``changes`` changes the quotas of all processes."""
        self._broker: Final = broker
        self._changes: Final = changes

    def table(self) -> Sequence[Endpoint]:
        entity = {
            "user": "name of the user; * for all users without a quota of their own",
            "client_id": "client id, as sent by Kafka clients; * for all others",
        }
        limits = {
            "produce": "bytes per second, also as text such as 1MB; null for no limit",
            "fetch": "bytes per second, also as text such as 1MB; null for no limit",
            "requests": "requests per second; null for no limit",
        }
        return [
            Endpoint(
                "GET",
                "/quotas",
                Action.USER_DESCRIBE,
                "List quotas, and what was used of them since the start",
                self._list,
            ),
            Endpoint(
                "POST",
                "/quotas",
                Action.USER_ALTER,
                "Change limits of a user, a client id or both; limits that are not named remain",
                self._alter,
                {**entity, **limits},
            ),
            Endpoint(
                "DELETE",
                "/quotas",
                Action.USER_ALTER,
                "Remove what was set for a user, a client id or both, and say whether there was any; a configured quota applies again",
                self._remove,
                entity,
            ),
        ]

    async def _list(self, call: ApiCall) -> Any:
        quotas = self._broker.access.quotas
        totals = quotas.totals()

        def row(quota: Quota) -> Mapping[str, Any]:
            caused = {kind: totals.get((quota.entity, kind), (0.0, 0.0)) for kind in quota.limits}
            used = {kind: count for kind, (count, _) in caused.items()}
            return {**self._quota_json(quota), "used": used, "delay_s": sum(delay for _, delay in caused.values())}

        found = await Listing(QUOTAS_MAX).extend(map(row, quotas), Slices())
        return {"quotas": found.rows, "more": found.more}

    def _quota_json(self, quota: Quota) -> Mapping[str, Any]:
        names = [None if name is None else name or "*" for name in quota.entity]
        limits = {kind: getattr(quota, kind) for kind in KINDS}
        is_configured = self._broker.access.quotas.is_configured(quota.entity)
        return {"user": names[0], "client_id": names[1], **limits, "configured": is_configured}

    async def _alter(self, call: ApiCall) -> Any:
        limits = {kind: _rate(call, kind) for kind in KINDS if kind in call.body}
        if not limits:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"a quota needs a limit: {', '.join(KINDS)}")
        return await self._set(call, limits)

    async def _remove(self, call: ApiCall) -> Any:
        quotas, entity = self._broker.access.quotas, _entity(call)
        was_set = not quotas.is_as_configured(quotas.of(entity))
        return {**await self._set(call, None), "removed": was_set}

    async def _set(self, call: ApiCall, limits: dict[str, float | None] | None) -> Mapping[str, Any]:
        user, client_id = _entity(call)
        done: asyncio.Future[Quota] = asyncio.get_running_loop().create_future()
        self._changes.set_quota(user, client_id, limits, by=call.principal, done=completing(done))
        return self._quota_json(await done)


def _entity(call: ApiCall) -> Entity:
    user, client_id = (_name(call, name) for name in ("user", "client_id"))
    return user, client_id


def _name(call: ApiCall, field: str) -> str | None:
    name = call.body.get(field)
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{field} must be a name or * got={name!r:.40}")
    return "" if name == "*" else name


def _rate(call: ApiCall, kind: str) -> float | None:
    rate = call.body[kind]
    if isinstance(rate, str):
        return parse_rate(rate)
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float)):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{kind} must be a number, a text or null got={rate!r:.40}")
    return rate
