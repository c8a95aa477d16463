"""Settings of topics, ACLs and SCRAM users of a Kafka cluster (spec: kafka#describeconfigs, kafka#acls)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from polywire.client.kafka import KafkaClient
from polywire.client.kafka_connection import check
from polywire.errors import ErrorCode
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        DescribeAclsResponse,
        DescribeConfigsResponse,
        DescribeUserScramCredentialsResponse,
    )

TOPIC: Final = 2  # resource types
SET_FOR_TOPIC: Final = 1  # source of a setting's value
ANY: Final = 1  # matches any value in a filter


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A setting of a topic. ``is_set``: it is set for this topic, and not the default of the cluster."""

    name: str
    value: str
    is_set: bool


@dataclass(frozen=True, slots=True)
class Acl:
    """An access rule, with Kafka's numbers."""

    principal: str
    host: str
    resource_type: int
    resource_name: str
    pattern_type: int
    operation: int
    permission_type: int


async def topic_configs(client: KafkaClient, topic: str) -> list[TopicConfig]:
    """Return all settings of a topic, without secrets. Raises Missing(TOPIC_MISSING), Denied."""
    resource = schema.request(Api.DESCRIBE_CONFIGS).Resources(
        resource_type=TOPIC, resource_name=topic, configuration_keys=None
    )
    answer: DescribeConfigsResponse = await client.ask(Api.DESCRIBE_CONFIGS, resources=[resource])
    for result in answer.results:
        check(result, missing=ErrorCode.TOPIC_MISSING)
    return [
        TopicConfig(config.name, config.value or "", config.config_source == SET_FOR_TOPIC)
        for result in answer.results
        for config in result.configs
        if not config.is_sensitive
    ]


async def acls(client: KafkaClient) -> list[Acl]:
    """Return all ACLs; none if the cluster does not use ACLs. Raises Denied."""
    answer: DescribeAclsResponse = await client.ask(
        Api.DESCRIBE_ACLS,
        resource_type_filter=ANY,
        resource_name_filter=None,
        pattern_type_filter=ANY,
        principal_filter=None,
        host_filter=None,
        operation=ANY,
        permission_type=ANY,
    )
    if answer.error == WireError.SECURITY_DISABLED:
        return []
    check(answer)
    return [
        Acl(
            acl.principal,
            acl.host,
            resource.resource_type,
            resource.resource_name,
            resource.pattern_type,
            acl.operation,
            acl.permission_type,
        )
        for resource in answer.resources
        for acl in resource.acls
    ]


async def scram_users(client: KafkaClient) -> list[str]:
    """Return the names of users who have SCRAM credentials. Raises Denied."""
    answer: DescribeUserScramCredentialsResponse = await client.ask(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, users=None)
    check(answer)
    return sorted(result.user for result in answer.results if not result.error)
