"""Methods of a broker that another process executes, because it has the topic.

``routed`` declares such a method, and ``gathered`` one whose result is combined from all processes. Arguments and results
travel as MessagePack, by the annotations of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, reduce, wraps
from inspect import Parameter, signature
from operator import or_
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast, get_args, get_type_hints

import msgspec

from polywire.broker.owners import ITSELF, NO_CALLER, Caller
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.protocols.runtime.shards import Shards
from polywire.routing.messages import BROKER, NO_USER, By, Place

_Result = TypeVar("_Result")
_Parameters = ParamSpec("_Parameters")
_COMPLETIONS: Final = ("done", "then")
_SENT: Final[Mapping[Any, Any]] = {
    Caller: By,
    Topic: bytes,
    Sequence[Topic]: tuple[bytes, ...],
    Partition: Place,
}
"""Types of arguments that are sent in another form."""
_encoder: Final = msgspec.msgpack.Encoder()


def by_of(caller: Caller) -> By:
    """Return a caller for another process, which knows users by their names only."""
    if caller is NO_CALLER:
        return NO_USER
    if caller is ITSELF:
        return BROKER
    return By("" if caller.principal is None else caller.principal.name, caller.owner)


class Receiver(Protocol):
    """Finds the objects of arguments in the process that executes a method. Raises Missing or Denied."""

    def caller(self, by: By, /) -> Caller:
        """Return the caller with this process's number of the user."""

    def topic(self, topic_id: bytes, /) -> Topic:
        """Return the topic with this id."""

    def partition(self, place: Place, /) -> Partition:
        """Return a partition."""


class Method:
    """A method of a broker, of a part of it, or of an object of a protocol.

    Attributes:
        name: path from the broker, such as ``groups.join``, or from the object of a protocol.
        part: the path without the method.
        completion: the parameter that gets the result later (``then``), or that is called once the result is stored
            (``done``); empty if there is neither.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Create the description. ``name`` is a path from the broker, such as ``groups.join``."""
        self.name: Final = name
        self._function: Final = function
        self.part: Final = name.rpartition(".")[0]
        self._parameters: Final = list(signature(function).parameters.values())[1:]
        names = self.parameters
        self.completion: Final = next((name for name in ("then", "done") if name in names), "")

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters."""
        return [parameter.name for parameter in self._parameters]

    @cached_property
    def _hints(self) -> Mapping[str, Any]:
        return get_type_hints(self._function)

    @cached_property
    def result(self) -> Any:
        """The type of the result."""
        if self.completion != "then":
            return self._hints["return"]
        kinds = [kind for kind in get_args(get_args(self._hints["then"])[0][0]) if kind is not BrokerError]
        return reduce(or_, kinds)

    @property
    def returns(self) -> bool:
        """Whether the caller needs the result before it can continue."""
        return self.completion != "then" and self.result is not type(None)

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
        """Encode the arguments of a call. Return them, and the callback among them.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST) for text that is no UTF-8 and integers of more than 64 bits, which
        the broker rejects, too.
        """
        arguments = dict(zip(self.parameters, values, strict=False)) | dict(options)
        callback = arguments.pop(self.completion, None)
        for name, value in arguments.items():
            if isinstance(value, Caller):
                arguments[name] = by_of(value)
            elif isinstance(value, Topic):
                arguments[name] = value.id
            elif self._hints[name] == Sequence[Topic]:
                arguments[name] = tuple([topic.id for topic in value])
            elif isinstance(value, Partition):
                arguments[name] = Place(value.topic.id, value.number)
        try:
            return _encoder.encode(self._arguments(**arguments)), callback
        except UnicodeEncodeError:
            raise Invalid(ErrorCode.INVALID_NAME, f"name is not valid UTF-8 method={self.name}") from None
        except OverflowError:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"number is out of range method={self.name}") from None

    def encode_result(self, result: Any) -> bytes:
        """Encode a result for the process that has called."""
        return _encoder.encode(None if self.result is type(None) else result)

    def decode_result(self, encoded: memoryview) -> Any:
        """Decode a result."""
        return msgspec.msgpack.decode(encoded, type=self.result)

    def execute(self, target: object, encoded: memoryview, receiver: Receiver, then: Completion[Any]) -> dict[str, Any]:
        """Execute a call in the process of the topic. ``then`` gets the result, now or later.

        Returns the arguments by name. Raises BrokerError.
        """
        sent = msgspec.msgpack.decode(encoded, type=self._arguments)
        arguments: dict[str, Any] = {}
        for name in sent.__struct_fields__:
            value, kind = getattr(sent, name), self._hints[name]
            if kind is Caller:
                value = receiver.caller(value)
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
    """Return the result of a method once it is stored, or the error if it was not stored."""
    return stored if isinstance(stored, BrokerError) else returned[0]


class Router(Protocol):
    """Sends calls to other processes."""

    @property
    def shards(self) -> Shards: ...

    def shard_with(self, subject: Topic | Partition | str) -> int:
        """Return the shard that has a topic, a partition, or the topic with a full name."""

    def call(self, shard: int, method: Method, values: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Execute a method in another process. Raises Pending if its result is needed and not known yet."""

    def call_all(self, method: Method, values: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
        """Execute a method in all other processes, and return the results by number of the shard. Raises Pending."""


def routed(
    name: str, function: Callable[Concatenate[Any, _Parameters], _Result], key: str
) -> Callable[Concatenate[Any, _Parameters], _Result]:
    """Return a method that is executed by the process with the topic. Its argument ``key`` names the topic.

    The object with this method has a ``router``, and ``local``, which executes the method in this process.
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


def gathered(
    name: str,
    function: Callable[Concatenate[Any, _Parameters], _Result],
    combine: Callable[[Sequence[_Result]], _Result],
) -> Callable[Concatenate[Any, _Parameters], _Result]:
    """Return a method that is executed by all processes. ``combine`` gets the results, this process's first."""
    method = Method(name, function)

    @wraps(function)
    def call(self: Any, *values: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        others = self.router.call_all(method, values, options)
        return combine([function(self.local, *values, **options), *others])

    call.method = method  # type: ignore[attr-defined]
    return cast(Callable[Concatenate[Any, _Parameters], _Result], call)


@cache
def method_of(part: str, function: Callable[..., Any]) -> Method:
    """Return a function whose first argument is the part of a protocol with this name (``session.Part``)."""
    return Method(f"{part}.{function.__name__}", function)


def methods_of(*parts: type) -> dict[str, Method]:
    """Return the methods of classes that were declared with ``routed`` or ``gathered``, by name."""
    found = [getattr(value, "method", None) for part in parts for value in vars(part).values()]
    return {method.name: method for method in found if isinstance(method, Method)}
