"""The users file: a line ``name:hash:permissions`` for each user.

The hash is Argon2id. SCRAM verifiers, if they were requested, follow the hash after spaces. Permissions are separated by
commas; a suffix ``@stream`` or ``@stream/topic`` limits a permission to a stream or a topic. A user whose permissions
are empty may do everything.

Comments and empty lines are retained. The file is replaced by renaming, so a reader never sees a partial file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from polywire.broker.access import ConfiguredUser
from polywire.broker.passwords import PASSWORD_BYTES_MAX, hash_password
from polywire.broker.permissions import EVERYTHING, new_grants, parse_grants
from polywire.broker.scram import Mechanism, make_verifier, parse_verifier
from polywire.choices import missing
from polywire.errors import Conflict, ErrorCode, Invalid, Missing
from polywire.server.file_permissions import check_secret

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_NAME: Final = re.compile(r"[^:\s#][^:\r\n]{0,254}")
_HASH: Final = re.compile(r"\$argon2id?\$[^:\s]{16,512}")
_PRIVATE: Final = 0o600


def read_users(path: Path) -> list[ConfiguredUser]:
    """Return the users in a file. Raises OSError, and Invalid(INVALID_REQUEST) with the number of an invalid line."""
    users = [_parse(path, number, line) for number, line in enumerate(_lines(path), 1) if _is_entry(line)]
    names = [user.name for user in users]
    for name in names:
        if names.count(name) > 1:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"the users file has a duplicate user file={str(path)!r} name={name!r}"
            )
    return users


def load_users(path: Path) -> list[ConfiguredUser]:
    """Return the users that a broker starts with.

    Raises the errors of ``read_users``, and Invalid(INVALID_REQUEST) if the file is missing, accessible to other users,
    or empty. An operator who configures a users file must not get a broker without authentication.
    """
    try:
        check_secret(path)
    except FileNotFoundError:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the users file does not exist (run polywire user add NAME --users {path}) file={str(path)!r}",
        ) from None
    users = read_users(path)
    if not users:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the users file is empty, which would turn authentication off (run polywire user add NAME --users {path})"
            f" file={str(path)!r}",
        )
    return users


def add_user(
    path: Path,
    name: str,
    password: str,
    permissions: str | None = None,
    *,
    replace: bool = False,
    scram: bool = False,
) -> ConfiguredUser:
    """Add a user to a file, which is created if it is missing; return the user as it is in the file.

    Args:
        permissions: words separated by commas. None: all for a new user, the present ones for a user that is replaced.
        replace: the user may exist; it gets the new password.
        scram: the user can also log in with SCRAM. A replaced user that could do so before still can.

    Raises:
        Conflict: USER_EXISTS: the user exists, and ``replace`` is not set.
        Invalid: INVALID_NAME, INVALID_REQUEST.
        OSError: the file cannot be read or written.
    """
    if _NAME.fullmatch(name) is None:
        raise Invalid(
            ErrorCode.INVALID_NAME,
            f"user name is invalid (must not contain ':' or begin with '#' or a space) name={name!r}",
        )
    if not 1 <= len(password.encode()) <= PASSWORD_BYTES_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"password must have 1 to {PASSWORD_BYTES_MAX} bytes")
    if permissions is not None:
        _check(permissions)
    lines = _lines(path) if path.exists() else ["# name:hash:permissions, see polywire user --help"]
    for number, line in enumerate(lines, 1):
        if _name_of(line) != name:
            continue
        if not replace:
            raise Conflict(ErrorCode.USER_EXISTS, f"user exists name={name!r}")
        scram = scram or bool(_parse(path, number, line).verifiers)
        if permissions is None:
            permissions = line.split(":", 2)[2]
    lines = [line for line in lines if _name_of(line) != name]
    verifiers = [make_verifier(password, mechanism) for mechanism in Mechanism] if scram else []
    secrets = " ".join([hash_password(password), *map(str, verifiers)])
    entry = f"{name}:{secrets}:{permissions or ''}"
    _write(path, [*lines, entry])
    return _parse(path, len(lines) + 1, entry)


def alter_user(path: Path, name: str, permissions: str) -> ConfiguredUser:
    """Replace the permissions of a user, and return the user. The password remains, and so do its logins.

    Raises Missing(USER_MISSING), Invalid(INVALID_REQUEST), OSError.
    """
    _check(permissions)
    lines = _lines(path)
    for number, line in enumerate(lines):
        if _name_of(line) == name:
            _parse(path, number + 1, line)
            secrets = line.split(":", 2)[1]
            lines[number] = f"{name}:{secrets}:{permissions}"
            _write(path, lines)
            return _parse(path, number + 1, lines[number])
    raise _no_such_user(name, lines)


def _check(permissions: str) -> None:
    """Raise Invalid for unknown words, and if there are none: in the file, that means all permissions."""
    words = _words(permissions)
    if not words:
        raise Invalid(ErrorCode.INVALID_REQUEST, "permissions are empty (write all to grant everything)")
    new_grants(words)


def _no_such_user(name: str, lines: list[str]) -> Missing:
    return missing(ErrorCode.USER_MISSING, "user", name, filter(None, map(_name_of, lines)))


def remove_user(path: Path, name: str) -> None:
    """Remove a user from a file. Raises Missing(USER_MISSING), OSError."""
    lines = _lines(path)
    rest = [line for line in lines if _name_of(line) != name]
    if len(rest) == len(lines):
        raise _no_such_user(name, lines)
    _write(path, rest)


def _lines(path: Path) -> list[str]:
    if path.stat().st_size > FILE_BYTES_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"users file is too large file={str(path)!r} limit={FILE_BYTES_MAX}")
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"users file is not UTF-8 file={str(path)!r}") from None


def _is_entry(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _name_of(line: str) -> str | None:
    return line.partition(":")[0] if _is_entry(line) else None


def _words(permissions: str) -> list[str]:
    return [word.strip() for word in permissions.split(",") if word.strip()]


def _parse(path: Path, number: int, line: str) -> ConfiguredUser:
    name, _, rest = line.partition(":")
    secrets, _, permissions = rest.partition(":")
    password_hash, *verifier_texts = secrets.split(" ")
    try:
        verifiers = tuple(map(parse_verifier, verifier_texts))
    except Invalid:
        password_hash = ""
    words = _words(permissions)
    is_unclear = bool(permissions.strip()) and not words  # only commas, which must not grant everything
    if _NAME.fullmatch(name) is None or _HASH.fullmatch(password_hash) is None or is_unclear:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"line is not name:hash:permissions file={str(path)!r} line={number}")
    return ConfiguredUser(name, password_hash, parse_grants(words) if words else EVERYTHING, verifiers)


def _write(path: Path, lines: list[str]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
