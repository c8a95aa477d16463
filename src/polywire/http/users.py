"""The endpoints for users and tokens.

* Responses contain no passwords or tokens, except the response that creates a token.
* A user can grant or revoke only permissions that it has itself. The broker checks this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from polywire.broker.access import Access
from polywire.broker.broker import Broker
from polywire.broker.permissions import EVERYTHING, NOTHING, Action, Grants, grant_words, new_grants
from polywire.broker.users import ROOT_ID, User
from polywire.errors import ErrorCode, Invalid
from polywire.http.encoding import Listing, Slices
from polywire.http.endpoints import ApiCall, Endpoint
from polywire.http.guard import completing

USERS_MAX: Final = 1_000  # users in one list
WORDS_MAX: Final = 1_000  # permissions of one user
EXPIRY_S_MAX: Final = 10 * 365 * 86_400  # lifetime of a token, in seconds


class Users:
    """The HTTP API's endpoints for users and tokens."""

    def __init__(self, broker: Broker, changes: Access) -> None:
        """``changes`` changes the users of all processes."""
        self._broker: Final = broker
        self._changes: Final = changes

    def table(self) -> Sequence[Endpoint]:
        permissions = {"permissions": "list of words, as for polywire user add; an empty list grants nothing"}
        new = {"password": "password of the user", **permissions, "active": "false disables the user"}
        password = {"password": "new password", "old": "current password; required for your own"}
        expiry = {"expires_in_s": "seconds until the token expires; by default it never does"}
        user_path, token = "/users/{user}", "/tokens/{token}"
        alter = Action.USER_ALTER
        return [
            Endpoint("GET", "/users", Action.USER_DESCRIBE, "List users", self._users),
            Endpoint("GET", user_path, Action.USER_DESCRIBE, "Describe a user", self._user, is_own=True),
            Endpoint("POST", user_path, Action.USER_CREATE, "Create a user", self._create, new),
            Endpoint("DELETE", user_path, Action.USER_DELETE, "Delete a user, its logins and its tokens", self._delete),
            Endpoint(
                "POST", f"{user_path}/permissions", alter, "Replace the permissions of a user", self._grant, permissions
            ),
            Endpoint(
                "POST",
                f"{user_path}/active",
                alter,
                "Enable or disable a user",
                self._activate,
                {"active": "true or false"},
            ),
            Endpoint(
                "POST",
                f"{user_path}/password",
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

    async def _users(self, call: ApiCall) -> Any:
        access = self._broker.access
        found = await Listing(USERS_MAX).extend(map(_user_json, access.users()), Slices())
        return {"users": found.rows, "open": access.is_open, "more": found.more}

    async def _user(self, call: ApiCall) -> Any:
        return _user_json(self._user_of(call))

    async def _self(self, call: ApiCall) -> Any:
        access = self._broker.access
        return {**_user_json(access.user(call.principal.user_id)), "open": access.is_open}

    def _user_of(self, call: ApiCall) -> User:
        return self._broker.access.user(call.path["user"])

    async def _create(self, call: ApiCall) -> Any:
        grants, active = _grants(call), _active(call) if "active" in call.body else True
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._changes.create_user(
            call.path["user"],
            call.text("password"),
            grants,
            active=active,
            by=call.principal,
            done=completing(done),
        )
        return _user_json(await done)

    async def _delete(self, call: ApiCall) -> Any:
        user = self._user_of(call)
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._changes.delete_user(user, by=call.principal, done=completing(done))
        await done
        return {"name": user.name}

    async def _grant(self, call: ApiCall) -> Any:
        user, grants = self._user_of(call), _grants(call)
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._changes.grant(user, grants, by=call.principal, done=completing(done))
        return _user_json(await done)

    async def _activate(self, call: ApiCall) -> Any:
        user, active = self._user_of(call), _active(call)
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        self._changes.update_user(user, active=active, by=call.principal, done=completing(done))
        return _user_json(await done)

    async def _change_password(self, call: ApiCall) -> Any:
        user, new = self._user_of(call), call.text("password")
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        if user.id == call.principal.user_id or "old" in call.body:
            self._changes.change_password(user, call.text("old"), new, by=call.principal, done=completing(done))
        else:
            self._changes.reset_password(user, new, by=call.principal, done=completing(done))
        return _user_json(await done)

    async def _new_token(self, call: ApiCall) -> Any:
        access, name = self._broker.access, call.path["token"]
        seconds = call.body.get("expires_in_s")
        if seconds is not None and (type(seconds) is not int or not 0 < seconds <= EXPIRY_S_MAX):
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"expires_in_s must be a number from 1 to {EXPIRY_S_MAX} got={seconds!r:.40}"
            )
        expires_at_us = None if seconds is None else self._broker.clock.now_us() + seconds * 1_000_000
        user = access.user(call.principal.user_id)
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        raw = self._changes.create_token(user, name, expires_at_us, by=call.principal, done=completing(done))
        await done
        return {"name": name, "token": raw, "expires_at_us": expires_at_us}

    async def _delete_token(self, call: ApiCall) -> Any:
        access, name = self._broker.access, call.path["token"]
        done: asyncio.Future[User] = asyncio.get_running_loop().create_future()
        user = access.user(call.principal.user_id)
        self._changes.delete_token(user, name, by=call.principal, done=completing(done))
        await done
        return {"name": name}


def _user_json(user: User) -> Mapping[str, Any]:
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


def _grants(call: ApiCall) -> Grants | None:
    """Return the permissions in the body; None if they are empty.

    Raises Invalid(INVALID_REQUEST) for unknown words.
    """
    words = call.body.get("permissions", [])
    if not isinstance(words, list) or len(words) > WORDS_MAX or not all(isinstance(word, str) for word in words):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"permissions must be a list of at most {WORDS_MAX} words")
    grants = new_grants(words)
    return None if grants == Grants(int(NOTHING)) else grants


def _active(call: ApiCall) -> bool:
    """Return ``active`` of the body. Raises Invalid(INVALID_REQUEST) if it is not a boolean."""
    active = call.body.get("active")
    if not isinstance(active, bool):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"active must be true or false got={active!r:.40}")
    return active
