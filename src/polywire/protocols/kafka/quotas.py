"""DescribeClientQuotas and AlterClientQuotas (spec: kafka#quotas).

Kafka's ``request_percentage``, a share of the processor's time, has no counterpart. ``request_rate`` limits the number
of requests per second instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from polywire.broker.client_quotas import DEFAULT, Entity, Quota, check_entity
from polywire.broker.permissions import Action
from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.messages import Api, Refused, WireError
from polywire.protocols.kafka.replies import PendingResponse, answer_in_slices, refuse
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        AlterClientQuotasRequest,
        AlterClientQuotasResponse,
        DescribeClientQuotasRequest,
        DescribeClientQuotasResponse,
    )

USER: Final = "user"
CLIENT_ID: Final = "client-id"
EXACT: Final = 0
DEFAULT_ONLY: Final = 1
KEYS: Final = {"producer_byte_rate": "produce", "consumer_byte_rate": "fetch", "request_rate": "requests"}
NAMES: Final = {kind: key for key, kind in KEYS.items()}
ALTERED_AT_ONCE_MAX: Final = 16  # entities that are changed in one step; each is a change in the journal


def describe_client_quotas(
    session: KafkaSession, answer: Answer, request: DescribeClientQuotasRequest, /
) -> DescribeClientQuotasResponse | None:
    response = schema.response(Api.DESCRIBE_CLIENT_QUOTAS)
    try:
        session.authorize(Action.USER_DESCRIBE)
        filters = _filters(request)
    except BrokerError as denied:
        return response(error=WireError.CLUSTER_AUTHORIZATION_FAILED, message=denied.message, entries=None)
    except Refused as refused:
        return response(error=refused.error, message=refused.message, entries=None)

    def entries() -> Iterator[DescribeClientQuotasResponse.Entries | None]:
        for quota in session.broker.access.quotas:
            is_meant = quota.limits and _matches(quota.entity, filters, strict=request.strict)
            yield _entry(quota) if is_meant else None

    return answer_in_slices(session.broker, answer, entries(), lambda found: response(entries=found))


def _filters(request: DescribeClientQuotasRequest) -> Mapping[str, DescribeClientQuotasRequest.Components]:
    filters = {component.entity_type: component for component in request.components}
    if len(filters) < len(request.components):
        raise Refused(WireError.INVALID_REQUEST, "the request names an entity type twice")
    return filters


def _matches(entity: Entity, filters: Mapping[str, DescribeClientQuotasRequest.Components], *, strict: bool) -> bool:
    names = {kind: name for kind, name in zip((USER, CLIENT_ID), entity, strict=True) if name is not None}
    if not filters.keys() <= names.keys() or (strict and filters.keys() != names.keys()):
        return False
    for kind, component in filters.items():
        match = component.match if component.match_type == EXACT else DEFAULT
        if component.match_type in (EXACT, DEFAULT_ONLY) and names[kind] != match:
            return False
    return True


def _entry(quota: Quota) -> DescribeClientQuotasResponse.Entries:
    made = schema.response(Api.DESCRIBE_CLIENT_QUOTAS).Entries
    return made(
        entity=[
            made.Entity(entity_type=kind, entity_name=name or None)
            for kind, name in zip((USER, CLIENT_ID), quota.entity, strict=True)
            if name is not None
        ],
        values=[made.Values(key=NAMES[kind], value=rate) for kind, rate in quota.limits.items()],
    )


def alter_client_quotas(session: KafkaSession, answer: Answer, request: AlterClientQuotasRequest, /) -> None:
    """AlterClientQuotas: change each entity independently of the others."""
    body = schema.response(Api.ALTER_CLIENT_QUOTAS)(entries=[])
    pending_response = PendingResponse(answer, body)
    steps = _alter_each(session, request, body.entries, pending_response)
    pending_response.run(session.broker, steps, at_once=ALTERED_AT_ONCE_MAX)


def _alter_each(
    session: KafkaSession,
    request: AlterClientQuotasRequest,
    results: list[AlterClientQuotasResponse.Entries],
    pending_response: PendingResponse,
) -> Iterator[None]:
    made = schema.response(Api.ALTER_CLIENT_QUOTAS).Entries
    for entry in request.entries:
        entity = [made.Entity(entity_type=part.entity_type, entity_name=part.entity_name) for part in entry.entity]
        result = made(entity=entity)
        results.append(result)
        _alter(session, entry, result, pending_response, validate_only=request.validate_only)
        yield None


def _alter(
    session: KafkaSession,
    entry: AlterClientQuotasRequest.Entries,
    result: AlterClientQuotasResponse.Entries,
    pending_response: PendingResponse,
    *,
    validate_only: bool,
) -> None:
    def done(stored: Quota | BrokerError) -> None:
        if isinstance(stored, BrokerError):
            refuse(result, stored, _quota_error(stored))
        pending_response.count_result()

    pending_response.expect()
    try:
        session.authorize(Action.USER_ALTER)
        user, client_id = _entity(entry)
        limits = _limits(entry)
        if validate_only:
            session.broker.access.check_quota((user, client_id), limits)
            pending_response.count_result()
        else:
            session.broker.users.set_quota(user, client_id, limits, by=session.principal, done=done)
    except Refused as refused:
        result.error, result.message = refused.error, refused.message
        pending_response.count_result()
    except BrokerError as error:
        done(error)


def _quota_error(error: BrokerError) -> WireError:
    if error.code is ErrorCode.USER_MISSING:
        return WireError.RESOURCE_NOT_FOUND
    return wire_error(error, denied=WireError.CLUSTER_AUTHORIZATION_FAILED)


def _entity(entry: AlterClientQuotasRequest.Entries) -> Entity:
    """Return the entity of a change. Raises Refused for other types than users and client ids."""
    names: dict[str, str] = {}
    for part in entry.entity:
        if part.entity_type not in (USER, CLIENT_ID):
            raise Refused(
                WireError.INVALID_REQUEST,
                f"entity type is not supported (use {USER} or {CLIENT_ID}) type={part.entity_type[:40]!r}",
            )
        if part.entity_type in names or part.entity_name == "":
            raise Refused(WireError.INVALID_REQUEST, "the entity names a type twice, or an empty name")
        names[part.entity_type] = part.entity_name or DEFAULT
    entity = names.get(USER), names.get(CLIENT_ID)
    check_entity(entity)
    return entity


def _limits(entry: AlterClientQuotasRequest.Entries) -> dict[str, float | None]:
    limits: dict[str, float | None] = {}
    for change in entry.ops:
        kind = KEYS.get(change.key)
        if kind is None:
            raise Refused(
                WireError.INVALID_REQUEST, f"quota is not supported (use {', '.join(KEYS)}) key={change.key[:40]!r}"
            )
        if kind in limits:
            raise Refused(WireError.INVALID_REQUEST, f"the request changes a quota twice key={change.key}")
        limits[kind] = None if change.remove else change.value
    return limits
