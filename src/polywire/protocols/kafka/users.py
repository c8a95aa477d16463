"""DescribeAcls, DescribeUserScramCredentials, AlterUserScramCredentials (spec: kafka#acls, kafka#other-calls).

The ACLs are computed from the users' permissions. An action without an ACL is not allowed; one with an ACL can still be
denied by a topic's access list. Long lists are built in slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from polywire.broker.permissions import Action, split_resource_name
from polywire.broker.scram import ITERATIONS_RANGE, Mechanism, Verifier, is_salt, verifier_of
from polywire.broker.users import User
from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.cluster import CLUSTER_OPERATIONS, TOPIC_OPERATIONS
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.groups import GROUP_OPERATIONS
from polywire.protocols.kafka.messages import Api, Refused, WireError
from polywire.protocols.kafka.replies import PendingResponse, answer_in_slices, refuse
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.kafka.structures import Record
from polywire.types import DEFAULT_STREAM, TopicName

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        AlterUserScramCredentialsRequest,
        AlterUserScramCredentialsResponse,
        DescribeAclsRequest,
        DescribeAclsResponse,
        DescribeUserScramCredentialsRequest,
        DescribeUserScramCredentialsResponse,
    )

    _Change = AlterUserScramCredentialsRequest.Deletions | AlterUserScramCredentialsRequest.Upsertions

RULES_MAX: Final = 20_000  # ACLs in one response, about 50 bytes each; to see more, filter by user or resource
ALTERED_AT_ONCE_MAX: Final = 16  # users that are changed in one step; each is a change in the journal
ANY: Final = 1  # matches any value in a filter
TOPIC: Final = 2  # resource types
GROUP: Final = 3
CLUSTER: Final = 4
TRANSACTIONAL_ID: Final = 5
WRITE: Final = 4  # operations
DESCRIBE: Final = 8
MATCH: Final = 2  # pattern types
LITERAL: Final = 3
PREFIXED: Final = 4
ALLOW: Final = 3
EVERY: Final = "*"
CLUSTER_NAME: Final = "kafka-cluster"
NUMBERS: Final = {Mechanism.SHA_256: 1, Mechanism.SHA_512: 2}
MECHANISMS: Final = {number: mechanism for mechanism, number in NUMBERS.items()}


class Resource(NamedTuple):
    kind: int
    name: str
    pattern: int


def describe_acls(
    session: KafkaSession, answer: Answer, request: DescribeAclsRequest, /
) -> DescribeAclsResponse | None:
    response = schema.response(Api.DESCRIBE_ACLS)
    access = session.broker.access
    try:
        session.authorize(Action.USER_DESCRIBE)
    except BrokerError as denied:
        return response(error=WireError.CLUSTER_AUTHORIZATION_FAILED, message=denied.message)
    if access.is_open:
        return response(error=WireError.SECURITY_DISABLED, message="this broker has no users")
    found = _Rules(response.Resources)

    def made(_: list[Record]) -> DescribeAclsResponse:
        if found.count > RULES_MAX:
            message = f"too many ACLs in one response (filter by user) limit={RULES_MAX}"
            return response(error=WireError.POLICY_VIOLATION, message=message)
        return response(resources=found.resources())

    return answer_in_slices(session.broker, answer, found.fill(session, request), made)


class _Rules:
    """ACLs by resource.

    Attributes:
        count: number of ACLs. It can exceed ``RULES_MAX`` by the ACLs of one resource.
    """

    __slots__ = ("_by_resource", "_made", "count")

    def __init__(self, made: type[DescribeAclsResponse.Resources]) -> None:
        self._made: Final = made
        self._by_resource: dict[Resource, list[DescribeAclsResponse.Resources.Acls]] = {}
        self.count = 0

    def fill(self, session: KafkaSession, request: DescribeAclsRequest) -> Iterator[None]:
        """Collect the ACLs that match the filter. Yields after each step."""
        if request.permission_type not in (ANY, ALLOW) or request.host_filter not in (None, EVERY):
            return
        for user in session.broker.access.users():
            principal = f"User:{user.name}"
            if request.principal_filter not in (None, principal):
                yield None
                continue
            for resource, operations in _rules(session, user, request):
                self._add(resource, principal, operations)
                yield None

    def _add(self, resource: Resource, principal: str, operations: list[int]) -> None:
        if not operations or self.count > RULES_MAX:
            return
        self.count += len(operations)
        self._by_resource.setdefault(resource, []).extend(
            self._made.Acls(principal=principal, host=EVERY, operation=number, permission_type=ALLOW)
            for number in operations
        )

    def resources(self) -> list[DescribeAclsResponse.Resources]:
        return [
            self._made(resource_type=kind, resource_name=name, pattern_type=pattern, acls=acls)
            for (kind, name, pattern), acls in self._by_resource.items()
        ]


def _rules(session: KafkaSession, user: User, request: DescribeAclsRequest) -> Iterator[tuple[Resource, list[int]]]:
    """Yield the resources that match the filter, with the user's operations on each."""
    for resource, operations in _allowed(session, user):
        is_meant = request.resource_type_filter in (ANY, resource.kind) and _names(request, resource)
        yield resource, [number for number in operations if is_meant and request.operation in (ANY, number)]


def _allowed(session: KafkaSession, user: User) -> Iterator[tuple[Resource, list[int]]]:
    """Yield the resources that a user may use, with the operations on each."""
    if user.grants is None or not user.active:
        return
    grants = user.grants.opened()
    cluster = [
        number for number, action in CLUSTER_OPERATIONS if action.needs_no_permission or grants.everywhere & action.bits
    ]
    yield Resource(CLUSTER, CLUSTER_NAME, LITERAL), cluster
    yield Resource(TOPIC, EVERY, LITERAL), _operations(grants.everywhere)
    for stream, bits in grants.streams.items():
        if stream != DEFAULT_STREAM:
            yield Resource(TOPIC, f"{stream}.", PREFIXED), _operations(bits)
            continue
        for topic in session.broker.topics():  # these topics have no common prefix, so no single ACL covers them
            if topic.name.stream == DEFAULT_STREAM:
                yield Resource(TOPIC, topic.name.full, LITERAL), _operations(bits)
    for resource, bits in grants.topics.items():
        yield Resource(TOPIC, TopicName(*split_resource_name(resource)).full, LITERAL), _operations(bits)
    groups = [number for number, action in GROUP_OPERATIONS if grants.allow_somewhere(action.bits)]
    yield Resource(GROUP, EVERY, LITERAL), groups  # limited by the topics that the user may read as a group
    if grants.allow_somewhere(Action.TRANSACTION.bits):
        # limited by the topics that the user may write to
        yield Resource(TRANSACTIONAL_ID, EVERY, LITERAL), [WRITE, DESCRIBE]


def _operations(bits: int) -> list[int]:
    return [number for number, action in TOPIC_OPERATIONS if bits & action.bits]


def _names(request: DescribeAclsRequest, resource: Resource) -> bool:
    name, pattern = request.resource_name_filter, request.pattern_type_filter
    if pattern not in (ANY, MATCH, resource.pattern):
        return False
    if name is None or name == resource.name:
        return True
    if pattern != MATCH:
        return False
    return resource.name == EVERY if resource.pattern == LITERAL else name.startswith(resource.name)


def describe_user_scram_credentials(
    session: KafkaSession, answer: Answer, request: DescribeUserScramCredentialsRequest, /
) -> DescribeUserScramCredentialsResponse | None:
    response = schema.response(Api.DESCRIBE_USER_SCRAM_CREDENTIALS)
    access = session.broker.access
    try:
        session.authorize(Action.USER_DESCRIBE)
    except BrokerError as denied:
        return response(error=WireError.CLUSTER_AUTHORIZATION_FAILED, message=denied.message)

    def entries() -> Iterator[DescribeUserScramCredentialsResponse.Results | None]:
        if not request.users:
            for user in access.users():
                yield _credentials(response.Results, user.name, user) if user.verifiers else None
            return
        for name, copies in Counter(change.name for change in request.users).items():
            entry = _credentials(response.Results, name, access.find_user(name))
            if copies > 1:
                entry = response.Results(
                    user=name, error=WireError.DUPLICATE_RESOURCE, message="the request names the user twice"
                )
            yield entry

    return answer_in_slices(session.broker, answer, entries(), lambda results: response(results=results))


def _credentials(
    made: type[DescribeUserScramCredentialsResponse.Results], name: str, user: User | None
) -> DescribeUserScramCredentialsResponse.Results:
    if user is None or not user.verifiers:
        return made(
            user=name, error=WireError.RESOURCE_NOT_FOUND, message="no such user, or the user has no SCRAM credentials"
        )
    infos = [
        made.CredentialInfos(mechanism=NUMBERS[verifier.mechanism], iterations=verifier.iterations)
        for verifier in user.verifiers
    ]
    return made(user=name, credential_infos=infos)


# Changes of SCRAM credentials


def alter_user_scram_credentials(
    session: KafkaSession, answer: Answer, request: AlterUserScramCredentialsRequest, /
) -> None:
    """AlterUserScramCredentials: apply all changes of a user together, independently of other users."""
    response = schema.response(Api.ALTER_USER_SCRAM_CREDENTIALS)
    body = response(results=[])
    pending_response = PendingResponse(answer, body)
    pending_response.run(
        session.broker, _alter_each(session, request, body.results, pending_response), at_once=ALTERED_AT_ONCE_MAX
    )


def _alter_each(
    session: KafkaSession,
    request: AlterUserScramCredentialsRequest,
    results: list[AlterUserScramCredentialsResponse.Results],
    pending_response: PendingResponse,
) -> Iterator[None]:
    by_user: dict[str, list[_Change]] = {}
    every_change: tuple[_Change, ...] = (*request.deletions, *request.upsertions)
    for change in every_change:
        by_user.setdefault(change.name, []).append(change)
    for name, changes in by_user.items():
        entry = schema.response(Api.ALTER_USER_SCRAM_CREDENTIALS).Results(user=name)
        results.append(entry)
        _alter(session, name, changes, entry, pending_response)
        yield None


def _alter(
    session: KafkaSession,
    name: str,
    changes: list[_Change],
    entry: AlterUserScramCredentialsResponse.Results,
    pending_response: PendingResponse,
) -> None:
    def done(result: User | BrokerError) -> None:
        if isinstance(result, BrokerError):
            refuse(entry, result, _user_error(result))
        pending_response.count_result()

    pending_response.expect()
    try:
        session.authorize(Action.USER_ALTER)
        session.broker.users.set_verifiers(name, _verifiers(changes), by=session.principal, done=done)
    except Refused as refused:
        entry.error, entry.message = refused.error, refused.message
        pending_response.count_result()
    except BrokerError as error:
        done(error)


def _user_error(error: BrokerError) -> WireError:
    if error.code is ErrorCode.USER_MISSING:
        return WireError.RESOURCE_NOT_FOUND
    if error.code is ErrorCode.INVALID_NAME:
        return WireError.UNACCEPTABLE_CREDENTIAL
    return wire_error(error, denied=WireError.CLUSTER_AUTHORIZATION_FAILED)


def _verifiers(changes: list[_Change]) -> dict[Mechanism, Verifier | None]:
    """Return the new verifier of each changed mechanism; None for a deleted one.

    Raises Refused for an invalid change.
    """
    upserted = schema.request(Api.ALTER_USER_SCRAM_CREDENTIALS).Upsertions
    found: dict[Mechanism, Verifier | None] = {}
    for change in changes:
        mechanism = MECHANISMS.get(change.mechanism)
        if mechanism is None:
            raise Refused(
                WireError.UNSUPPORTED_SASL_MECHANISM,
                f"unknown mechanism (use 1 for SCRAM-SHA-256 or 2 for SCRAM-SHA-512) mechanism={change.mechanism}",
            )
        if mechanism in found:
            raise Refused(WireError.DUPLICATE_RESOURCE, "the request changes the same mechanism twice")
        found[mechanism] = _verifier(change, mechanism) if isinstance(change, upserted) else None
    return found


def _verifier(change: AlterUserScramCredentialsRequest.Upsertions, mechanism: Mechanism) -> Verifier:
    """Return the verifier for a password that the client has salted.

    Raises Refused if the salt, the salted password or the number of iterations is not allowed.
    """
    if change.iterations not in ITERATIONS_RANGE:
        limits = f"{ITERATIONS_RANGE[0]} to {ITERATIONS_RANGE[-1]}"
        raise Refused(
            WireError.UNACCEPTABLE_CREDENTIAL,
            f"number of iterations is out of range iterations={change.iterations} limits={limits}",
        )
    salt, salted = bytes(change.salt), bytes(change.salted_password)
    if not is_salt(salt) or len(salted) != mechanism.key_bytes:
        raise Refused(
            WireError.UNACCEPTABLE_CREDENTIAL,
            "salt must have 1 to 64 bytes, and the salted password as many bytes as the hash",
        )
    return verifier_of(salted, mechanism, salt=salt, iterations=change.iterations)
