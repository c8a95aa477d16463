"""The file of contexts: brokers by name, each with its addresses, user and source of the password.

A context sets the environment variables that commands read, unless they are set already. So an option overrides the
environment, and the environment overrides a context. Its authorities replace those of the environment, which are for all programs.

* The file is only accessible to its owner.
* A password of a context is sent to no other address than those of the context.
* Without a context, no file is read but the one that names the current context.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from polywire.choices import unknown
from polywire.cli.output import Failed
from polywire.client.address import PASSWORD_VARIABLE

OPTION: Final = "--context"
VARIABLE: Final = "POLYWIRE_CONTEXT"
ADDRESS: Final = "POLYWIRE_ADDRESS"
HTTP: Final = "POLYWIRE_HTTP"
AUTHORITY: Final = "SSL_CERT_FILE"
FILE_BYTES_MAX: Final = 1024 * 1024
CONTEXTS_MAX: Final = 1_000
PASSWORD_BYTES_MAX: Final = 4096
COMMAND_S: Final = 120.0  # a password store may have to be unlocked
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PRIVATE: Final = 0o600
_OTHERS: Final = 0o077


@dataclass(frozen=True, slots=True)
class Context:
    """One broker.

    Attributes:
        address: value of the ``--address`` option, without a login.
        http: value of the ``--http`` option, without a login. If it is empty, the default for the address applies.
        user: name of the user.
        password, password_file, password_command: the password, the file with it, or the command that prints it.
        tls_authority: file with the certificates of the authorities that clients trust.
    """

    address: str
    http: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    password_command: str = ""
    tls_authority: str = ""

    @property
    def password_source(self) -> str:
        sources = {"file": self.password_file, "command": self.password_command, "context": self.password}
        return next(
            (f"{name} {source}" if name != "context" else name for name, source in sources.items() if source), ""
        )


_FIELDS: Final = tuple(field.name for field in fields(Context))


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts, and the name of the current one (empty for none)."""

    by_name: Mapping[str, Context]
    current: str = ""

    def find(self, name: str) -> Context:
        """Return a context. Raises Invalid(INVALID_REQUEST), with the names of all."""
        if name not in self.by_name:
            raise unknown("context", name, self.by_name)
        return self.by_name[name]


def contexts_file() -> Path:
    """Return the path of the file, in the user's directory for configuration."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # the specification ignores relative paths
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "polywire" / "contexts.toml"


def check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise Failed(f"context name is invalid (use 1 to 64 letters, digits, '.', '_' and '-') name={name!r}")


def load() -> Contexts:
    """Read the file. Raises Failed if it is invalid, or accessible to other users."""
    path = contexts_file()
    text = _read_private(path, FILE_BYTES_MAX)
    if text is None:
        return Contexts({})
    import tomllib  # not needed by most commands

    try:
        found = tomllib.loads(text)
        return _contexts(found)
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise Failed(f"the file of contexts is invalid reason={str(error)!r} file={str(path)!r}") from None


def _contexts(found: Mapping[str, Any]) -> Contexts:
    """Check the content of the file. Raises ValueError."""
    tables, current = found.get("contexts", {}), found.get("current", "")
    if found.keys() - {"contexts", "current"} or not isinstance(tables, dict) or not isinstance(current, str):
        raise ValueError("only current and tables of contexts are allowed")
    by_name = {}
    for name, table in tables.items():
        values = table.items() if isinstance(table, dict) else ()
        if _NAME.fullmatch(name) is None or "address" not in dict(values):
            raise ValueError(f"context {name!r} has an invalid name or no address")
        for key, value in values:
            if key not in _FIELDS or not isinstance(value, str):
                raise ValueError(
                    f"context {name!r} has an unknown or invalid setting {key!r} (use {', '.join(_FIELDS)})"
                )
        by_name[name] = Context(**table)
    if current and current not in by_name:
        raise ValueError(f"the current context {current!r} does not exist")
    return Contexts(by_name, current)


def save(contexts: Contexts) -> None:
    """Replace the file by renaming, so that a reader never sees a partial file. Raises Failed, OSError."""
    if len(contexts.by_name) > CONTEXTS_MAX:
        raise Failed(f"too many contexts limit={CONTEXTS_MAX}")
    path = contexts_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w", encoding="utf-8") as file:
        file.write("\n".join(_lines(contexts)) + "\n")
    os.replace(temporary, path)


def _lines(contexts: Contexts) -> Iterator[str]:
    yield "# polywire context; read by commands that connect to a broker"
    if contexts.current:
        yield f"current = {_quoted(contexts.current)}"
    for name, context in sorted(contexts.by_name.items()):
        yield ""
        yield f"[contexts.{_quoted(name)}]"
        for key in _FIELDS:
            if getattr(context, key):
                yield f"{key} = {_quoted(getattr(context, key))}"


def _quoted(text: str) -> str:
    """Return a TOML string. TOML has the escapes of JSON, and one more control character must be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read_private(path: Path, bytes_max: int) -> str | None:
    """Return the text of a file with secrets; None if it does not exist. Raises Failed, OSError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    if mode & _OTHERS and os.name == "posix":
        raise Failed(f"other users can access a file with secrets (run chmod 600 {path}) file={str(path)!r}")
    if len(data) > bytes_max:
        raise Failed(f"file is too large limit={bytes_max} file={str(path)!r}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Failed(f"file is not UTF-8 file={str(path)!r}") from None


def without_option(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the words of a command without ``--context NAME``, and the name. Raises Failed if the name is missing."""
    for at, word in enumerate(words):
        if word == "--":
            break
        if word.startswith(f"{OPTION}="):
            return [*words[:at], *words[at + 1 :]], word.partition("=")[2]
        if word == OPTION:
            if at + 1 == len(words):
                raise Failed(f"{OPTION} needs the name of a context (list them with: polywire context list)")
            return [*words[:at], *words[at + 2 :]], words[at + 1]
    return list(words), None


def apply(name: str | None, words: Sequence[str]) -> None:
    """Set the environment variables of a context for a command.

    Raises Failed, Invalid(INVALID_REQUEST) and OSError if the context or its password cannot be read.

    Args:
        name: value of the option; None if it is not given. Then a broker's address in the environment has precedence
            over the context of the environment, and over the current one.
        words: the command with its options.
    """
    is_explicit = name is not None
    if name is None:
        if os.environ.get(ADDRESS):
            return
        name = os.environ.get(VARIABLE)
    contexts = load() if name != "" else Contexts({})
    name = contexts.current if name is None else name
    if not name:
        return
    context = contexts.find(name)
    has_other_address = bool(os.environ.get(ADDRESS))
    os.environ[ADDRESS] = _with_user(context.address, context.user)
    if is_explicit:  # otherwise the environment has precedence
        os.environ.pop(HTTP, None)
        if context.password_source or has_other_address:
            os.environ.pop(PASSWORD_VARIABLE, None)
    if context.http and not os.environ.get(HTTP):
        os.environ[HTTP] = _with_user(context.http, context.user)
    if context.tls_authority:
        os.environ[AUTHORITY] = str(Path(context.tls_authority).expanduser())
    if context.user and not os.environ.get(PASSWORD_VARIABLE) and not any(map(_is_address, words)):
        password = _password(context)
        if password:
            os.environ[PASSWORD_VARIABLE] = password


def _is_address(word: str) -> bool:
    """Return whether an option chooses another broker than that of the context, which must not get its password."""
    return word.startswith(("--address", "--http")) or (word.startswith("-a") and not word.startswith("--"))


def _with_user(url: str, user: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{quote(user, safe='')}@{rest}" if user else url


def _password(context: Context) -> str:
    """Return the password of a context; empty if it has none. Raises Failed."""
    if context.password_file:
        path = Path(context.password_file).expanduser()
        text = _read_private(path, PASSWORD_BYTES_MAX)
        if text is None:
            raise Failed(f"the file with the password does not exist file={str(path)!r}")
        return _first_line(text, f"file={str(path)!r}")
    if context.password_command:
        return _first_line(_output(context.password_command), f"command={context.password_command!r}")
    return context.password


def _output(command: str) -> str:
    """Return what a command prints. Its messages go to the terminal, where it may also ask for something."""
    try:
        done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, timeout=COMMAND_S, check=False)
        text = done.stdout.decode()
    except (OSError, ValueError) as error:
        raise Failed(f"the command for the password failed reason={str(error)!r} command={command!r}") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"the command for the password takes too long limit_s={COMMAND_S:g} command={command!r}") from None
    if done.returncode:
        raise Failed(f"the command for the password failed exit={done.returncode} command={command!r}")
    return text


def _first_line(text: str, source: str) -> str:
    password = text.partition("\n")[0].rstrip("\r")
    if not password:
        raise Failed(f"the password is empty {source}")
    return password
