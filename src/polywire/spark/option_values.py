"""Check and convert values of Spark options, for source and sink.

A wrong name or value raises an error that suggests the right option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, TypeVar

from polywire.choices import did_you_mean
from polywire.client.login import PASSWORD_VARIABLE, Login, login_of
from polywire.errors import ErrorCode, Invalid

ADDRESS_DEFAULT: Final = "127.0.0.1:9555"  # default of `polywire serve` for the polywire protocol
ADDRESSES: Final = ("address", "kafka.bootstrap.servers", "bootstrap.servers")
LOGIN: Final = ("user", "password")

# Spark's Kafka source and sink refuse these, too. The text says what to do instead.
_CAST_COLUMNS: Final = "is not supported: keys and values are binary here; cast the columns in the query"
_REFUSED_AS_BY_KAFKA: Final = {
    "group.id": "is not supported: a query keeps its positions in its checkpoint; set commitGroup to show them as a group",
    "auto.offset.reset": "is not supported: set startingOffsets",
    "enable.auto.commit": "is not supported: a query keeps its positions in its checkpoint; remove it",
    "interceptor.classes": "is not supported; remove it",
    "key.deserializer": _CAST_COLUMNS,
    "value.deserializer": _CAST_COLUMNS,
    "key.serializer": _CAST_COLUMNS,
    "value.serializer": _CAST_COLUMNS,
}

_T = TypeVar("_T")


def known(given: Mapping[str, str], names: Sequence[str], *, topics: str) -> dict[str, str]:
    """Return the options, with their names spelled as in ``names``. Case is ignored.

    ``topics`` is the name of the option that selects topics. Raises Invalid(INVALID_REQUEST) for any other name.
    """
    by_lower = {name.lower(): name for name in names}
    options: dict[str, str] = {}
    for key, value in given.items():
        name = by_lower.get(key.lower())
        if name is None:
            _refuse_unknown(key, by_lower, topics)
        options[name] = value
    return options


def _refuse_unknown(key: str, by_lower: Mapping[str, str], topics: str) -> NoReturn:
    if key.lower() == "path":
        refuse("path", f"is not used; name topics with the option {topics}")
    for ending, why in _REFUSED_AS_BY_KAFKA.items():
        if key.lower().removeprefix("kafka.") == ending:
            refuse(key, why)
    if key.lower().startswith("kafka."):
        refuse(key, "configures Kafka's own client and has no meaning here; remove it")
    raise Invalid(
        ErrorCode.INVALID_REQUEST, f"unknown option{did_you_mean(key, sorted(by_lower.values()))} option={key!r}"
    )


def refuse(name: str, why: str) -> NoReturn:
    """Raise Invalid(INVALID_REQUEST) for an option."""
    raise Invalid(ErrorCode.INVALID_REQUEST, f"the option {name} {why}")


def addresses(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the brokers' addresses (``host:port``), which one of three options may give."""
    given = [name for name in ADDRESSES if name in options]
    if not given:
        return (ADDRESS_DEFAULT,)
    if len(given) > 1:
        refuse("address", f"is given more than once, under the names {', '.join(given)}")
    found = tuple(_without_name(given[0], part.strip()) for part in options[given[0]].split(",") if part.strip())
    for address in found:
        host, colon, port = address.removeprefix("polywire+tls://").removeprefix("polywire://").rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            refuse(given[0], f"must be host:port, or several separated by commas, not {address!r}")
    if not found:
        refuse(given[0], "is empty")
    return found


def _without_name(option: str, address: str) -> str:
    scheme, separator, rest = address.rpartition("://")
    name, _, place = rest.rpartition("@")
    if ":" in name:
        refuse(option, "must not contain a password, because Spark shows it: set the options user and password")
    return f"{scheme}{separator}{place}"


def login(options: Mapping[str, str]) -> Login | None:
    """Return the login from the options user and password, or from the name before an address.

    The password may also come from the environment.
    """
    named = [options[name].rpartition("://")[2].rpartition("@")[0] for name in ADDRESSES if name in options]
    user, password = options.get("user", "").strip() or next(iter(named), ""), options.get("password")
    if not user:
        if password is not None:
            refuse("password", "needs the option user")
        return None
    try:
        return login_of(user, password)
    except Invalid:
        refuse("user", f"needs the option password, or the variable {PASSWORD_VARIABLE} where the query is started")


def switch(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Convert ``true`` or ``false`` to bool."""
    text = options.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        refuse(name, f"must be true or false, not {text!r}")
    return text == "true"


def count(options: Mapping[str, str], name: str, *, zero: bool = False) -> int | None:
    """Convert a whole number above 0 (with ``zero``, at least 0). Return None if the option is absent."""
    text = options.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or (int(text) == 0 and not zero):
        refuse(name, f"must be a whole number {'of 0 or more' if zero else 'above 0'}, not {text!r}")
    return int(text)


def choice(
    options: Mapping[str, str], name: str, kind: Callable[[str], _T], default: _T, *, among: Sequence[str]
) -> _T:
    """Convert one of the words in ``among``. ``kind`` is an enum with these values."""
    text = options.get(name)
    if text is None:
        return default
    try:
        return kind(text.strip().lower())
    except ValueError:
        refuse(name, f"must be {', '.join(among[:-1])} or {among[-1]}, not {text!r}")
