"""The endpoints about users and tokens.

Promises: passwords and tokens are answered to nobody but a new token, once, to who asked for it; nobody gives or takes what it may not do
itself (the broker sees to it). Must not know: how requests arrive, how users are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from polywire.broker.actions import Action
from polywire.broker.broker import Broker
from polywire.broker.permissions import EVERYTHING, NOTHING, Grants, grant_words, parse_grants
from polywire.broker.users import ROOT_ID, User
from polywire.errors import ErrorCode, Invalid
from polywire.http.endpoints import Asked, Endpoint
from polywire.http.guard import completing
from polywire.http.slices import Slices
from polywire.http.spelling import Listing

USERS_MAX: Final = 1_000  # users of one list
WORDS_MAX: Final = 1_000  # permissions of one user
EXPIRY_S_MAX: Final = 10 * 365 * 86_400  # lifetime of a token, in seconds


class Users:
    """The endpoints of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker: Final = broker

    def table(self) -> Sequence[Endpoint]:
        """Every endpoint."""
        permissions = {"permissions": "list of words, as for polywire user add; an empty list grants nothing"}
        new = {"password": "password of the user", **permissions, "active": "false disables the user"}
        password = {"password": "new password", "old": "current password; required for your own"}
        expiry = {"expires_in_s": "seconds until the token expires; by default it never does"}
        one, token = "/users/{user}", "/tokens/{token}"
        alter = Action.USER_ALTER
        return [
            Endpoint("GET", "/users", Action.USER_DESCRIBE, "List users", self._users),
            Endpoint("GET", one, Action.USER_DESCRIBE, "Describe a user", self._user, is_own=True),
            Endpoint("POST", one, Action.USER_CREATE, "Create a user", self._create, new),
            Endpoint("DELETE", one, Action.USER_DELETE, "Delete a user, its logins and its tokens", self._delete),
            Endpoint(
                "POST", f"{one}/permissions", alter, "Replace the permissions of a user", self._grant, permissions
            ),
            Endpoint(
                "POST", f"{one}/active", alter, "Enable or disable a user", self._activate, {"active": "true or false"}
            ),
            Endpoint(
                "POST",
                f"{one}/password",
                alter,
                "Replace a password; ends the user's logins and tokens",
                self._change_password,
                password,
                is_own=True,
            ),
            Endpoint("GET", "/self", Action.SELF_DESCRIBE, "Describe the authenticated user", self._self),
            Endpoint(
                "POST",
                token,
                Action.TOKEN_CREATE,
                "Create a token of your own; only this response contains it",
                self._new_token,
                expiry,
            ),
            Endpoint("DELETE", token, Action.TOKEN_DELETE, "Delete a token of your own", self._delete_token),
        ]

    async def _users(self, asked: Asked) -> Any:
        access = self._broker.access
        found = await Listing(USERS_MAX).extend(map(_shown, access.users()), Slices())
        return {"users": found.rows, "open": access.is_open, "more": found.more}

    async def _user(self, asked: Asked) -> Any:
        return _shown(self._named(asked))

    async def _self(self, asked: Asked) -> Any:
        access = self._broker.access
        return {**_shown(access.user(asked.principal.user_id)), "open": access.is_open}

    def _named(self, asked: Asked) -> User:
        return self._broker.access.user(asked.path["user"])

    async def _create(self, asked: Asked) -> Any:
        grants, active = _grants(asked), _active(asked) if "active" in asked.body else True
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._broker.access.create_user(
            asked.path["user"],
            asked.text("password"),
            grants,
            active=active,
            by=asked.principal,
            done=completing(done),
        )
        return _shown(await done)

    async def _delete(self, asked: Asked) -> Any:
        user = self._named(asked)
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._broker.access.delete_user(user, by=asked.principal, done=completing(done))
        await done
        return {"name": user.name}

    async def _grant(self, asked: Asked) -> Any:
        user, grants = self._named(asked), _grants(asked)
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._broker.access.grant(user, grants, by=asked.principal, done=completing(done))
        return _shown(await done)

    async def _activate(self, asked: Asked) -> Any:
        user, active = self._named(asked), _active(asked)
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._broker.access.update_user(user, active=active, by=asked.principal, done=completing(done))
        return _shown(await done)

    async def _change_password(self, asked: Asked) -> Any:
        access, user, new = self._broker.access, self._named(asked), asked.text("password")
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        if user.id == asked.principal.user_id or "old" in asked.body:
            access.change_password(user, asked.text("old"), new, by=asked.principal, done=completing(done))
        else:
            access.reset_password(user, new, by=asked.principal, done=completing(done))
        return _shown(await done)

    async def _new_token(self, asked: Asked) -> Any:
        access, name = self._broker.access, asked.path["token"]
        seconds = asked.body.get("expires_in_s")
        if seconds is not None and (type(seconds) is not int or not 0 < seconds <= EXPIRY_S_MAX):
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"expires_in_s must be a number from 1 to {EXPIRY_S_MAX} got={seconds!r:.40}"
            )
        expires_at_us = None if seconds is None else self._broker.clock.now_us() + seconds * 1_000_000
        user = access.user(asked.principal.user_id)
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        raw = access.create_token(user, name, expires_at_us, by=asked.principal, done=completing(done))
        await done
        return {"name": name, "token": raw, "expires_at_us": expires_at_us}

    async def _delete_token(self, asked: Asked) -> Any:
        access, name = self._broker.access, asked.path["token"]
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        user = access.user(asked.principal.user_id)
        access.delete_token(user, name, by=asked.principal, done=completing(done))
        await done
        return {"name": name}


def _shown(user: User) -> Mapping[str, Any]:
    return {
        "name": user.name,
        "active": user.active,
        "configured": user.configured,
        "permissions": [] if user.grants is None else grant_words(user.grants),
        "everything": user.id == ROOT_ID or (user.grants is not None and user.grants.opened().cover(EVERYTHING)),
        "scram": bool(user.verifiers),
        "created_at_us": user.created_at_us or None,
        "tokens": [token.name for token in user.tokens],
    }


def _grants(asked: Asked) -> Grants | None:
    """Raises Invalid(INVALID_REQUEST)."""
    words = asked.body.get("permissions", [])
    if not isinstance(words, list) or len(words) > WORDS_MAX or not all(isinstance(word, str) for word in words):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"permissions must be a list of at most {WORDS_MAX} words")
    grants = parse_grants(words)
    return None if grants == Grants(int(NOTHING)) else grants


def _active(asked: Asked) -> bool:
    """Raises Invalid(INVALID_REQUEST)."""
    active = asked.body.get("active")
    if not isinstance(active, bool):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"active must be true or false got={active!r:.40}")
    return active
