"""Declare the methods of a broker that can be called in another process.

``routed`` declares a method that runs in the process that owns its topic. ``aggregated`` declares a method that runs in
all processes, and combines the results. Arguments and results are encoded as MessagePack, according to the annotations
of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, reduce, wraps
from inspect import Parameter, signature
from operator import or_
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from polywire.broker.owners import ITSELF, NO_CALLER, Caller
from polywire.broker.topics import Partition, Topic
from polywire.broker.users import Principal, User
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.protocols.runtime.shards import Shards
from polywire.routing.messages import BROKER, NO_USER, By, PartitionId

_Result = TypeVar("_Result")
_Parameters = ParamSpec("_Parameters")
_COMPLETIONS: Final = ("done", "then")
_SENT: Final[Mapping[Any, Any]] = {
    Caller: By,
    Topic: bytes,
    User: int,
    Sequence[Topic]: tuple[bytes, ...],
    Partition: PartitionId,
}
"""Types of arguments that cannot be encoded, with the type that is sent instead."""
_encoder: Final = msgspec.msgpack.Encoder()


def by_of(caller: Caller) -> By:
    """Return the form of a caller that is sent to another process."""
    if caller is NO_CALLER:
        return NO_USER
    if caller is ITSELF:
        return BROKER
    return By("" if caller.principal is None else caller.principal.name, caller.owner)


class Receiver(Protocol):
    """Converts received arguments to objects of the process that executes the call. Raises Missing or Denied."""

    def caller(self, by: By, /) -> Caller:
        """Convert a sent caller. Raises Denied if its user was deleted or deactivated."""

    def principal(self, sent: Principal, /) -> Principal:
        """Return the principal with this process's state of its logins. Raises Denied like ``caller``."""

    def user(self, user_id: int, /) -> User:
        """Return the user with this id."""

    def topic(self, topic_id: bytes, /) -> Topic:
        """Return the topic with this id."""

    def partition(self, partition_id: PartitionId, /) -> Partition:
        """Return the partition with this id."""


class Method:
    """A method that can be called in another process.

    Attributes:
        name: path from the broker (``groups.join``), or from the object of a protocol (``session.Part``).
        part: path without the method (``groups``); empty for a method of the broker itself.
        completion: name of the callback parameter: ``then`` gets the result, ``done`` is called when the result is
            stored. Empty if the method has no callback.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Read the parameters of ``function``. For ``name``, see the attribute."""
        self.name: Final = name
        self._function: Final = function
        self.part: Final = name.rpartition(".")[0]
        self._parameters: Final = list(signature(function).parameters.values())[1:]
        names = self.parameters
        self.completion: Final = next((name for name in ("then", "done") if name in names), "")

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters without ``self``."""
        return [parameter.name for parameter in self._parameters]

    @cached_property
    def _hints(self) -> Mapping[str, Any]:
        return get_type_hints(self._function)

    @cached_property
    def result(self) -> Any:
        """The type of the return value, or else of what the completion gets.

        None for a ``done`` that gets an int, which is always 0.
        """
        if self.returns or not self.completion:
            return self._hints["return"]
        hint = self._hints[self.completion]
        callback = next((kind for kind in get_args(hint) if get_origin(kind) is Callable), hint)  # without None
        kind = reduce(or_, [kind for kind in get_args(get_args(callback)[0][0]) if kind is not BrokerError])
        return type(None) if (self.completion, kind) == ("done", int) else kind

    @property
    def returns(self) -> bool:
        """Whether the caller needs a return value, and must therefore wait for the response."""
        return self.completion != "then" and self._hints["return"] is not type(None)

    @cached_property
    def _arguments(self) -> type[msgspec.Struct]:
        fields: list[Any] = []
        for parameter in self._parameters:
            if parameter.name in _COMPLETIONS:
                continue
            kind = self._hints[parameter.name]
            field: tuple[Any, ...] = (parameter.name, _SENT.get(kind, kind))
            if parameter.default is not Parameter.empty:
                default = by_of(parameter.default) if isinstance(parameter.default, Caller) else parameter.default
                field = (*field, default)
            fields.append(field)
        return msgspec.defstruct("Arguments", fields, omit_defaults=True, kw_only=True, frozen=True)

    def encode(self, values: Sequence[Any], options: Mapping[str, Any]) -> tuple[bytes, Any]:
        """Return the encoded arguments, and the callback among the arguments (None if there is none).

        Raises Invalid(INVALID_NAME) for text that is not valid UTF-8, and Invalid(INVALID_REQUEST) for integers of more
        than 64 bits. The broker rejects both, too.
        """
        arguments = dict(zip(self.parameters, values, strict=False)) | dict(options)
        callback = arguments.pop(self.completion, None)
        for name, value in arguments.items():
            if isinstance(value, Caller):
                arguments[name] = by_of(value)
            elif isinstance(value, Topic | User):
                arguments[name] = value.id
            elif self._hints[name] == Sequence[Topic]:
                arguments[name] = tuple([topic.id for topic in value])
            elif isinstance(value, Partition):
                arguments[name] = PartitionId(value.topic.id, value.number)
        try:
            return _encoder.encode(self._arguments(**arguments)), callback
        except UnicodeEncodeError:
            raise Invalid(ErrorCode.INVALID_NAME, f"name is not valid UTF-8 method={self.name}") from None
        except OverflowError:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"number is out of range method={self.name}") from None

    def encode_result(self, result: Any) -> bytes:
        """Encode a result for the calling process."""
        return _encoder.encode(None if self.result is type(None) else result)

    def decode_result(self, encoded: memoryview) -> Any:
        """Decode a result. It is 0 for a change that was stored."""
        result = msgspec.msgpack.decode(encoded, type=self.result)
        return 0 if self.completion == "done" and self.result is type(None) else result

    def execute(self, target: object, encoded: memoryview, receiver: Receiver, then: Completion[Any]) -> dict[str, Any]:
        """Execute a received call. ``then`` gets the result, possibly before this returns.

        Returns the decoded arguments by name. Raises BrokerError if the arguments are invalid or the call fails.
        """
        sent = msgspec.msgpack.decode(encoded, type=self._arguments)
        arguments: dict[str, Any] = {}
        for name in sent.__struct_fields__:
            value, kind = getattr(sent, name), self._hints[name]
            if kind is Caller:
                value = receiver.caller(value)
            elif isinstance(value, Principal):
                value = receiver.principal(value)
            elif kind is User:
                value = receiver.user(value)
            elif kind is Topic:
                value = receiver.topic(value)
            elif kind == Sequence[Topic]:
                value = [receiver.topic(topic_id) for topic_id in value]
            elif kind is Partition:
                value = receiver.partition(value)
            arguments[name] = value
        if not self.completion:
            then(self._function(target, **arguments))
        elif self.completion == "then":
            self._function(target, **arguments, then=then)
        else:
            returned: list[Any] = []
            done = then if not self.returns else lambda stored: then(_stored(returned, stored))
            returned.append(self._function(target, **arguments, done=done))
        return arguments


def _stored(returned: Sequence[Any], stored: object) -> Any:
    """Return the first of ``returned`` if storing succeeded, or the error."""
    return stored if isinstance(stored, BrokerError) else returned[0]


class Router(Protocol):
    """Calls methods in other processes."""

    @property
    def shards(self) -> Shards: ...

    def shard_with(self, subject: Topic | Partition | str) -> int:
        """Return the shard of a topic, of a partition, or of the topic with this full name."""

    def call(self, shard: int, method: Method, values: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Call a method in another process. If it has a return value, raises Pending until the value is known."""

    def call_all(self, method: Method, values: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
        """Call a method in all other processes, and return the results in the order of shards. Raises Pending."""


def routed(
    name: str, function: Callable[Concatenate[Any, _Parameters], _Result], key: str
) -> Callable[Concatenate[Any, _Parameters], _Result]:
    """Return a method that runs in the process of a topic.

    The argument ``key`` is the topic, a partition of it, or its name.

    The object with this method needs the attributes ``router`` and ``local``. ``local`` has the same method for this
    process.
    """
    method = Method(name, function)
    at = method.parameters.index(key)

    @wraps(function)
    def call(self: Any, *values: _Parameters.args, **options: _Parameters.kwargs) -> Any:
        router: Router = self.router
        subject: Any = values[at] if at < len(values) else options[key]
        shard = router.shard_with(subject)
        if shard == router.shards.own:
            return function(self.local, *values, **options)
        return router.call(shard, method, values, options)

    call.method = method  # type: ignore[attr-defined]
    return cast(Callable[Concatenate[Any, _Parameters], _Result], call)


def aggregated(
    name: str,
    function: Callable[Concatenate[Any, _Parameters], _Result],
    combine: Callable[[Sequence[_Result]], _Result],
) -> Callable[Concatenate[Any, _Parameters], _Result]:
    """Return a method that runs in all processes. ``combine`` gets all results; that of this process is first."""
    method = Method(name, function)

    @wraps(function)
    def call(self: Any, *values: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        others = self.router.call_all(method, values, options)
        return combine([function(self.local, *values, **options), *others])

    call.method = method  # type: ignore[attr-defined]
    return cast(Callable[Concatenate[Any, _Parameters], _Result], call)


@cache
def method_of(part: str, function: Callable[..., Any]) -> Method:
    """Describe a function whose first argument is an object of a protocol.

    ``part`` is the name of the object (``session.Part``).
    """
    return Method(f"{part}.{function.__name__}", function)


def methods_of(*parts: type) -> dict[str, Method]:
    """Return the methods of classes that were declared with ``routed`` or ``aggregated``, by name."""
    found = [getattr(value, "method", None) for part in parts for value in vars(part).values()]
    return {method.name: method for method in found if isinstance(method, Method)}
