"""Topic, group and broker settings under Kafka's names (spec: kafka#describeconfigs, kafka#alterconfigs).

* Some settings have an effect, which applies to clients of all protocols.
* Kafka's other settings are stored and returned, but have no effect.
* All requests reject unknown names and invalid values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from polywire import share_settings
from polywire.broker.permissions import Action
from polywire.broker.settings import TOPIC_RANGES, BrokerSettings, Compression, TopicSettings
from polywire.errors import BrokerError, Denied, ErrorCode, Invalid
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import WIRE, Api, WireError
from polywire.protocols.kafka.replies import HasError, PendingResponse, answer_in_slices, refuse
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.types import spell_address

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        AlterConfigsRequest,
        AlterConfigsResponse,
        CreateTopicsRequest,
        CreateTopicsResponse,
        DescribeConfigsRequest,
        DescribeConfigsResponse,
        IncrementalAlterConfigsRequest,
        IncrementalAlterConfigsResponse,
    )

    _Resource = TypeVar("_Resource", AlterConfigsRequest.Resources, IncrementalAlterConfigsRequest.Resources)
    _Response = TypeVar("_Response", AlterConfigsResponse, IncrementalAlterConfigsResponse)

TOPIC: Final = 2  # resource types
BROKER: Final = 4
GROUP: Final = 32
DELETE: Final = 1  # operations
APPEND: Final = 2

DESCRIBED_AT_ONCE_MAX: Final = 8  # resources in one step, each with about thirty settings

TOPIC_CONFIG: Final = 1  # source of a setting's value
STATIC_CONFIG: Final = 4
DEFAULT_CONFIG: Final = 5
GROUP_CONFIG: Final = 8
BOOLEAN: Final = 1  # type of a setting's value
STRING: Final = 2
INT: Final = 3
LONG: Final = 5
DOUBLE: Final = 6
LIST: Final = 7
FOREVER: Final = "-1"
VALUE_BYTES_MAX: Final = 4096
TIME_TYPE: Final = "message.timestamp.type"
TIME_OF_APPEND: Final = "LogAppendTime"
BEFORE: Final = "message.timestamp.before.max.ms"
AFTER: Final = "message.timestamp.after.max.ms"
AHEAD_MS_MAX: Final = 3_600_000  # default limit for timestamps that are ahead of the broker's clock
_LONG_MAX: Final = 2**63 - 1
_EVER: Final = str(_LONG_MAX)
_NUMBERS: Final = {INT: range(2**31), LONG: range(2**63)}
WITHOUT_EFFECT: Final = "no effect: the value is stored and returned"
_DIGITS_MAX: Final = 20  # digits of a number; a 64-bit number never has more
_PARSED_MAX: Final = 256  # topic settings whose parsed form is cached; in stored form, they can have 10 KiB per topic


class Config(msgspec.Struct, frozen=True):
    """A topic setting.

    Attributes:
        kind: Kafka's number of the value's type.
        words: the allowed words; None allows any word.
        numbers: the allowed numbers; None allows all numbers of the type.
        default: the value if none is set.
        effect: description of the effect; empty if the setting has none.
    """

    kind: int
    default: str
    effect: str = ""
    words: frozenset[str] | None = None
    numbers: range | None = None

    @property
    def allowed(self) -> range | None:
        """The allowed numbers, or None if the setting is not numeric."""
        return self.numbers or _NUMBERS.get(self.kind)

    @property
    def allowed_text(self) -> str:
        """The allowed values, as messages and the reference page describe them."""
        if self.kind == BOOLEAN:
            return "true or false"
        if self.kind == DOUBLE:
            return "0 to 1"
        if self.allowed is not None:
            return f"{self.allowed.start} to {self.allowed.stop - 1}"
        return "a list" if self.words is None else " or ".join(sorted(self.words))


def _from(low: int, kind: int) -> range:
    return range(low, _NUMBERS[kind].stop)


TOPIC_CONFIGS: Final[Mapping[str, Config]] = {
    "cleanup.policy": Config(
        LIST,
        "delete",
        "`compact` retains the newest record of each key; retention limits apply with every value",
        frozenset({"delete", "compact", "compact,delete", "delete,compact"}),
    ),
    "compression.type": Config(
        STRING,
        "producer",
        "`lz4` and `zstd` compress stored segments; other values store them uncompressed",
        frozenset({"producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"}),
    ),
    "delete.retention.ms": Config(LONG, "86400000"),
    "file.delete.delay.ms": Config(LONG, "60000"),
    "flush.messages": Config(LONG, _EVER, numbers=_from(1, LONG)),
    "flush.ms": Config(LONG, _EVER),
    "follower.replication.throttled.replicas": Config(LIST, ""),
    "index.interval.bytes": Config(INT, "4096"),
    "leader.replication.throttled.replicas": Config(LIST, ""),
    "local.retention.bytes": Config(LONG, "-2", numbers=_from(-2, LONG)),
    "local.retention.ms": Config(LONG, "-2", numbers=_from(-2, LONG)),
    "max.compaction.lag.ms": Config(LONG, _EVER, numbers=_from(1, LONG)),
    "max.message.bytes": Config(
        INT,
        str(BATCH_BYTES_MAX),
        "largest batch in bytes, as the producer sends it",
        numbers=range(BATCH_BYTES_MAX + 1),
    ),
    AFTER: Config(LONG, str(AHEAD_MS_MAX), "records with a timestamp further ahead of the broker's clock are refused"),
    BEFORE: Config(LONG, _EVER, "records with a timestamp further behind the broker's clock are refused"),
    TIME_TYPE: Config(
        STRING,
        "CreateTime",
        "with `LogAppendTime` the broker sets the timestamps of records",
        frozenset({"CreateTime", TIME_OF_APPEND}),
    ),
    "min.cleanable.dirty.ratio": Config(DOUBLE, "0.5"),
    "min.compaction.lag.ms": Config(LONG, "0"),
    "min.insync.replicas": Config(INT, "1", numbers=_from(1, INT)),
    "preallocate": Config(BOOLEAN, "false"),
    "remote.storage.enable": Config(BOOLEAN, "false"),
    "retention.bytes": Config(
        LONG, FOREVER, "the size above which a partition drops its oldest records; -1 for none", numbers=_from(-1, LONG)
    ),
    "retention.ms": Config(
        LONG, FOREVER, "the age above which records are dropped; -1 for none", numbers=_from(-1, LONG)
    ),
    "segment.bytes": Config(INT, "1073741824", numbers=_from(14, INT)),
    "segment.index.bytes": Config(INT, "10485760", numbers=_from(4, INT)),
    "segment.jitter.ms": Config(LONG, "0"),
    "segment.ms": Config(LONG, "604800000", numbers=_from(1, LONG)),
    "unclean.leader.election.enable": Config(BOOLEAN, "false"),
}
"""All settings of a topic.

Requests check and describe settings by this table. The reference page is generated from it.
"""


class ProduceLimits(msgspec.Struct, frozen=True):
    """A topic's limits for produced batches.

    Attributes:
        bytes_max: maximum size of a batch.
        has_times_of_append: whether consumers get append times instead of the producers' timestamps.
        before_ms, after_ms: how far timestamps may be behind and ahead of the broker's clock; None for any time.
    """

    bytes_max: int = BATCH_BYTES_MAX
    has_times_of_append: bool = False
    before_ms: int | None = None
    after_ms: int = AHEAD_MS_MAX


DEFAULT_LIMITS: Final = ProduceLimits()


def produce_limits(settings: TopicSettings) -> ProduceLimits:
    stored = settings.wire_options.get(WIRE)
    return DEFAULT_LIMITS if stored is None else _parsed(stored)


@lru_cache(_PARSED_MAX)
def _parsed(stored: bytes) -> ProduceLimits:
    given = msgspec.json.decode(stored, type=dict[str, str])
    before_ms = _number(given, BEFORE)
    return ProduceLimits(
        bytes_max=_number(given, "max.message.bytes"),
        has_times_of_append=given.get(TIME_TYPE) == TIME_OF_APPEND,
        before_ms=None if before_ms == _LONG_MAX else before_ms,
        after_ms=_number(given, AFTER),
    )


def _number(given: Mapping[str, str], name: str) -> int:
    """Return the stored number, or the default if it is out of range. Earlier versions stored such numbers."""
    config = TOPIC_CONFIGS[name]
    value = given.get(name, config.default)
    return int(value if _is_allowed(config, value) else config.default)


def given_of(settings: TopicSettings) -> dict[str, str]:
    """Return the values that clients have set over this protocol, by name."""
    stored = settings.wire_options.get(WIRE)
    return {} if stored is None else msgspec.json.decode(stored, type=dict[str, str])


def given_values(
    configs: Iterable[CreateTopicsRequest.Topics.Configs | AlterConfigsRequest.Resources.Configs],
) -> dict[str, str | None]:
    """Return the values in a request, by name of the setting.

    Raises Invalid(INVALID_REQUEST) if a value is missing.
    """
    for config in configs:
        if config.value is None:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"topic setting has no value name={config.name[:255]!r}")
    return {config.name: config.value for config in configs}


def settings_of(given: Mapping[str, str | None], base: TopicSettings | None = None) -> TopicSettings:
    """Return ``base`` with other values. None as a value restores the default.

    Raises Invalid(INVALID_REQUEST) for an unknown name or an invalid value.
    """
    settings = base or TopicSettings()
    stored = given_of(settings)
    for name, value in given.items():
        if value is None:
            stored.pop(name, None)
        else:
            stored[name] = _checked(name, value)
        settings = _with(settings, name, value)
    options = {wire: data for wire, data in settings.wire_options.items() if wire != WIRE}
    if stored:
        options[WIRE] = msgspec.json.encode(stored)
    return replace(settings, wire_options=options)


def _with(settings: TopicSettings, name: str, value: str | None) -> TopicSettings:
    match name:
        case "cleanup.policy":
            return replace(settings, compaction=value is not None and "compact" in value)
        case "compression.type":
            stored = {"lz4": Compression.LZ4, "zstd": Compression.ZSTD}
            return replace(settings, compression=stored.get(value or "", Compression.NONE))
        case "retention.ms":
            return replace(settings, retention_age_us=_limit(value, "retention_age_us", 1000))
        case "retention.bytes":
            return replace(settings, retention_bytes=_limit(value, "retention_bytes", 1))
        case _:
            return settings


def _limit(value: str | None, name: str, scale: int) -> int | None:
    """Convert a limit from Kafka's convention (-1 for unlimited) to the broker's (0 for unlimited, at least 1)."""
    if value is None:
        return None
    number = int(value)
    return 0 if number < 0 else max(min(number * scale, TOPIC_RANGES[name].stop - 1), 1)


def _checked(name: str, value: str) -> str:
    """Return the value. Raises Invalid(INVALID_REQUEST) if it is invalid."""
    config = TOPIC_CONFIGS.get(name)
    if config is None:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown topic setting name={name[:255]!r}")
    value = value.strip()
    if not _is_allowed(config, value):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"topic setting is invalid: {name} (use {config.allowed_text}) value={value[:255]!r}",
        )
    return value


def _is_allowed(config: Config, value: str) -> bool:
    if len(value) > VALUE_BYTES_MAX or not (config.kind == LIST or value.isascii()):
        return False
    if config.kind == BOOLEAN:
        return value.lower() in ("true", "false")
    if config.kind == DOUBLE:
        return len(value) < _DIGITS_MAX and value.replace(".", "", 1).isdigit() and 0 <= float(value) <= 1
    if config.allowed is not None:
        digits = value.removeprefix("-")
        return digits.isdigit() and len(digits) < _DIGITS_MAX and int(value) in config.allowed
    return config.words is None or value.replace(" ", "") in config.words


def value_of(name: str, settings: TopicSettings, broker: BrokerSettings) -> tuple[str, bool]:
    """Return the effective value of a topic setting, and whether it is set for the topic."""
    given = given_of(settings).get(name)
    match name:
        case "cleanup.policy":
            if given is None or ("compact" in given) is not settings.compaction:
                return ("compact", True) if settings.compaction else ("delete", False)
        case "retention.ms":
            age = settings.retention_age_us
            return _limit_text(broker.retention_age_us if age is None else age, 1000), age is not None
        case "retention.bytes":
            size = settings.retention_bytes
            return _limit_text(broker.retention_bytes if size is None else size, 1), size is not None
    if given is not None:
        return given, True
    return TOPIC_CONFIGS[name].default, False


def _limit_text(limit: int, scale: int) -> str:
    return FOREVER if limit == 0 else str(limit // scale)


def entries_of(broker: BrokerSettings, settings: TopicSettings) -> list[CreateTopicsResponse.Topics.Configs]:
    """Return all settings of a topic for the response to its creation."""
    made = schema.response(Api.CREATE_TOPICS).Topics.Configs
    entries = []
    for name in TOPIC_CONFIGS:
        value, is_own = value_of(name, settings, broker)
        entries.append(made(name=name, value=value, config_source=TOPIC_CONFIG if is_own else DEFAULT_CONFIG))
    return entries


# Requests


def describe_configs(
    session: KafkaSession, answer: Answer, request: DescribeConfigsRequest, /
) -> DescribeConfigsResponse | None:
    response = schema.response(Api.DESCRIBE_CONFIGS)
    entries = (_described(session, response.Results, resource, request) for resource in request.resources)
    made = partial(_response, response)
    return answer_in_slices(session.broker, answer, entries, made, at_once=DESCRIBED_AT_ONCE_MAX)


def _response(
    response: type[DescribeConfigsResponse], results: list[DescribeConfigsResponse.Results]
) -> DescribeConfigsResponse:
    return response(results=results)


def _described(
    session: KafkaSession,
    made: type[DescribeConfigsResponse.Results],
    resource: DescribeConfigsRequest.Resources,
    request: DescribeConfigsRequest,
) -> DescribeConfigsResponse.Results:
    result = made(resource_type=resource.resource_type, resource_name=resource.resource_name, configs=[])
    try:
        described = _describe(session, resource)
    except BrokerError as error:
        refuse(result, error, _refusal(error, resource.resource_type))
        return result
    names = None if resource.configuration_keys is None else frozenset(resource.configuration_keys)
    result.configs = [
        _config_entry(made.Configs, setting, request) for setting in described if names is None or setting.name in names
    ]
    return result


class _Described(msgspec.Struct, frozen=True):
    name: str
    value: str
    kind: int
    source: int
    read_only: bool
    default: str | None = None
    documentation: str | None = None


def _describe(session: KafkaSession, resource: DescribeConfigsRequest.Resources) -> Sequence[_Described]:
    """Return the settings of a resource. Raises BrokerError if it does not exist or the client may not read them."""
    broker = session.broker
    if resource.resource_type == TOPIC:
        session.authorize(Action.TOPIC_DESCRIBE, broker.resource(resource.resource_name))
        settings = broker.topic(resource.resource_name).settings
        found = []
        for name, config in TOPIC_CONFIGS.items():
            value, is_own = value_of(name, settings, broker.settings)
            source = TOPIC_CONFIG if is_own else DEFAULT_CONFIG
            setting = _Described(
                name, value, config.kind, source, False, config.default, config.effect or WITHOUT_EFFECT
            )
            found.append(setting)
        return found
    if resource.resource_type == GROUP:
        return _of_group(session, resource.resource_name)
    session.authorize(Action.CLUSTER_DESCRIBE)
    if resource.resource_type != BROKER or resource.resource_name not in ("", str(session.shared.node_id)):
        raise Invalid(ErrorCode.INVALID_REQUEST, "only topics, groups and this broker have settings")
    if not resource.resource_name:
        return ()
    return [_Described(name, value, kind, STATIC_CONFIG, read_only=True) for name, value, kind in _of_broker(session)]


def _of_group(session: KafkaSession, name: str) -> list[_Described]:
    """Return the settings of a share group, which need not exist. Raises Denied(DENIED), Invalid(INVALID_NAME)."""
    shares = session.broker.shares
    session.broker.access.authorize_somewhere(session.principal, Action.GROUP_DESCRIBE)
    shares.directory.check_configuration(name, {}, by=session.caller)
    own = shares.directory.stored_settings(name)
    return [
        _Described(
            setting,
            own.get(setting, default),
            INT if setting in share_settings.NUMBERS else STRING,
            GROUP_CONFIG if setting in own else DEFAULT_CONFIG,
            read_only=False,
            default=default,
        )
        for setting, default in share_settings.DEFAULTS.items()
    ]


def _of_broker(session: KafkaSession) -> Iterator[tuple[str, str, int]]:
    settings = session.broker.settings
    directory = session.shared.settings.data_dir
    listener = f"PLAINTEXT://{spell_address(*session.address)}"
    yield "advertised.listeners", listener, STRING
    yield "auto.create.topics.enable", str(settings.auto_create).lower(), BOOLEAN
    yield "broker.id", str(session.shared.node_id), INT
    yield "compression.type", "producer", STRING
    yield "default.replication.factor", "1", INT
    yield "delete.topic.enable", "true", BOOLEAN
    yield "listeners", listener, STRING
    yield "log.cleanup.policy", "delete", LIST
    yield "log.dirs", "" if directory is None else str(directory.absolute()), STRING
    yield "log.message.timestamp.type", "CreateTime", STRING
    yield "log.retention.bytes", _limit_text(settings.retention_bytes, 1), LONG
    yield "log.retention.ms", _limit_text(settings.retention_age_us, 1000), LONG
    yield "message.max.bytes", TOPIC_CONFIGS["max.message.bytes"].default, INT
    yield "min.insync.replicas", "1", INT
    yield "node.id", str(session.shared.node_id), INT
    yield "num.partitions", str(settings.partition_count), INT
    yield "offsets.retention.minutes", str(settings.positions_expiry_us // 60_000_000), INT


def _config_entry(
    made: type[DescribeConfigsResponse.Results.Configs], setting: _Described, request: DescribeConfigsRequest
) -> DescribeConfigsResponse.Results.Configs:
    named = []
    if request.include_synonyms:
        named.append(made.Synonyms(name=setting.name, value=setting.value, source=setting.source))
        if setting.source in (TOPIC_CONFIG, GROUP_CONFIG) and setting.default is not None:
            named.append(made.Synonyms(name=setting.name, value=setting.default, source=DEFAULT_CONFIG))
    return made(
        name=setting.name,
        value=setting.value,
        read_only=setting.read_only,
        config_source=setting.source,
        synonyms=named,
        config_type=setting.kind,
        documentation=setting.documentation if request.include_documentation else None,
    )


def alter_configs(session: KafkaSession, answer: Answer, request: AlterConfigsRequest, /) -> None:
    """AlterConfigs: set the named settings, and reset all others to their defaults."""

    def given(resource: AlterConfigsRequest.Resources, settings: TopicSettings) -> dict[str, str | None]:
        del settings
        names = share_settings.DEFAULTS if resource.resource_type == GROUP else TOPIC_CONFIGS
        return dict.fromkeys(names) | given_values(resource.configs)

    response = schema.response(Api.ALTER_CONFIGS)
    _alter(session, answer, request.resources, response, given, validate_only=request.validate_only)


def incremental_alter_configs(
    session: KafkaSession, answer: Answer, request: IncrementalAlterConfigsRequest, /
) -> None:
    """IncrementalAlterConfigs: change the named settings only."""
    response = schema.response(Api.INCREMENTAL_ALTER_CONFIGS)
    _alter(session, answer, request.resources, response, _operated, validate_only=request.validate_only)


def _operated(resource: IncrementalAlterConfigsRequest.Resources, settings: TopicSettings) -> dict[str, str | None]:
    """Return the new values of the changed settings, by name; None restores the default.

    Raises Invalid(INVALID_REQUEST) for a repeated setting, a missing value, or an unknown operation.
    """
    made: dict[str, str | None] = {}
    for change in resource.configs:
        if change.name in made or (change.value is None and change.config_operation != DELETE):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"setting has no value, or is repeated name={change.name[:255]!r}")
        match change.config_operation:
            case 0:
                made[change.name] = change.value
            case 1:
                made[change.name] = None
            case 2 | 3:
                made[change.name] = _listed(change, settings)
            case _:
                raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown operation number={change.config_operation}")
    return made


def _listed(change: IncrementalAlterConfigsRequest.Resources.Configs, settings: TopicSettings) -> str:
    """Return the value of a setting that is a list of words, after words were appended or removed.

    Raises Invalid(INVALID_REQUEST) if the setting is not a list.
    """
    config = TOPIC_CONFIGS.get(change.name)
    if config is None or config.kind != LIST:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"setting is not a list name={change.name[:255]!r}")
    assert change.value is not None, "_operated checked this"
    words = [word for word in given_of(settings).get(change.name, config.default).split(",") if word]
    named = [word.strip() for word in change.value.split(",")]
    if change.config_operation == APPEND:
        return ",".join([*words, *(word for word in named if word not in words)])
    return ",".join(word for word in words if word not in named)


def _alter(
    session: KafkaSession,
    answer: Answer,
    resources: Iterable[_Resource],
    response: type[_Response],
    given: Callable[[_Resource, TopicSettings], dict[str, str | None]],
    *,
    validate_only: bool,
) -> None:
    """Change the settings of topics and groups. Settings of the broker cannot be changed over this protocol.

    ``given`` returns the new values of the settings, from the request's entry and the current settings of the topic.
    """
    body = response(responses=[])
    pending_response = PendingResponse(answer, body)

    def entries() -> Iterator[None]:
        for resource in resources:
            made = response.Responses(resource_type=resource.resource_type, resource_name=resource.resource_name)
            body.responses.append(made)
            pending_response.expect()
            try:
                _alter_topic(session, pending_response, resource, made, given, validate_only=validate_only)
            except BrokerError as error:
                refuse(made, error, _refusal(error, resource.resource_type))
                pending_response.count_result()
            yield None

    pending_response.run(session.broker, entries())


def _alter_topic(
    session: KafkaSession,
    pending_response: PendingResponse,
    resource: _Resource,
    made: HasError,
    given: Callable[[_Resource, TopicSettings], dict[str, str | None]],
    *,
    validate_only: bool,
) -> None:
    broker = session.broker
    if resource.resource_type == GROUP:
        broker.access.authorize_somewhere(session.principal, Action.GROUP_CREATE)
        changed = dict(broker.shares.directory.stored_settings(resource.resource_name))
        for setting, value in given(resource, TopicSettings()).items():
            if value is None:
                changed.pop(setting, None)
            else:
                changed[setting] = value.strip()
        if validate_only:
            broker.shares.directory.check_configuration(resource.resource_name, changed, by=session.caller)
            pending_response.count_result()
        else:
            done = partial(pending_response.set_result, made)
            broker.shares.directory.configure(resource.resource_name, changed, by=session.caller, done=done)
        return
    if resource.resource_type != TOPIC:
        session.authorize(Action.CLUSTER_ALTER)
        refuse(
            made,
            Invalid(ErrorCode.INVALID_REQUEST, "only settings of topics and groups can be changed"),
            WireError.INVALID_REQUEST,
        )
        pending_response.count_result()
        return
    session.authorize(Action.TOPIC_ALTER, broker.resource(resource.resource_name))
    topic = broker.topic(resource.resource_name)
    settings = settings_of(given(resource, topic.settings), topic.settings)
    if validate_only:
        settings.check()
        pending_response.count_result()
    else:
        broker.configure_topic(topic, settings, done=partial(pending_response.set_result, made))


def _refusal(error: BrokerError, resource_type: int) -> WireError | None:
    """Return the Kafka error if it depends on the type of the resource, otherwise None."""
    if isinstance(error, Denied) and resource_type != TOPIC:
        return (
            WireError.GROUP_AUTHORIZATION_FAILED if resource_type == GROUP else WireError.CLUSTER_AUTHORIZATION_FAILED
        )
    return WireError.INVALID_CONFIG if resource_type in (TOPIC, GROUP) and isinstance(error, Invalid) else None
