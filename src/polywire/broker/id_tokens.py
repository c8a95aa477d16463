"""Logins with tokens of an OpenID Connect provider (decision 0140).

A token is a JSON Web Token that the provider has signed. One of its claims names a user of the broker, whose
permissions apply. The broker reads the provider's public keys from a file or a URL. It does not contact the provider at
a login.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog

from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.errors import Denied, ErrorCode, Invalid

# No symmetric algorithms: a symmetric key would be public in the key set, and anyone could sign with it.
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
KEYS_BYTES_MAX: Final = 1024 * 1024
TOKEN_BYTES_MAX: Final = 16 * 1024
LEEWAY_S: Final = 30  # tolerated difference between the clocks of the broker and the provider
FETCH_S: Final = 10.0
REFETCH_S: Final = 30.0  # seconds between requests for keys, because a client can cause one with an unknown key id
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
log = structlog.get_logger("polywire.broker")


class Provider(msgspec.Struct, frozen=True):
    """A provider whose tokens are accepted as logins.

    Attributes:
        issuer, audience: required values of the claims ``iss`` and ``aud``.
        keys: file or URL of the JSON Web Key Set with the public keys.
        user_claim: claim with the name of the user.
    """

    issuer: str
    audience: str
    keys: str
    user_claim: str = "sub"

    @property
    def is_remote(self) -> bool:
        return "://" in self.keys

    def check(self) -> None:
        """Raise Invalid(INVALID_REQUEST) if a setting is missing, or the URL is not secure."""
        if not (self.issuer and self.audience and self.keys and self.user_claim):
            raise Invalid(ErrorCode.INVALID_REQUEST, "logins with tokens need an issuer, an audience, and keys")
        parts = urlsplit(self.keys)
        if self.is_remote and parts.scheme != "https" and (parts.scheme, parts.hostname in _LOOPBACK) != ("http", True):
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"keys of the token issuer must be a file or an https URL got={self.keys!r}"
            )


class IdTokens:
    """Verifies tokens of one provider."""

    def __init__(self, provider: Provider, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises Invalid(INVALID_REQUEST) if PyJWT is not installed."""
        provider.check()
        try:
            import jwt
        except ImportError:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, "logins with tokens need PyJWT (run pip install 'polywire[oidc]')"
            ) from None
        self._jwt: Final = jwt
        self._provider: Final = provider
        self._clock: Final = clock
        self._keys: Mapping[str | None, Any] = {}
        self._fetched_at: float | None = None
        self._is_fetching = False
        self._run: Callable[[Callable[[], None]], None] = _in_thread

    def load(self) -> None:
        """Read the keys again. Keys from a URL are fetched in a thread and are used once they have arrived.

        If a file is invalid or cannot be read, raises Invalid(INVALID_REQUEST) or OSError; the previous keys remain in
        use.
        """
        if self._provider.is_remote:
            self._fetch()
            return
        with Path(self._provider.keys).open("rb") as file:
            self._keys = self._parse(file.read(KEYS_BYTES_MAX + 1))

    def _parse(self, data: bytes) -> Mapping[str | None, Any]:
        try:
            if len(data) > KEYS_BYTES_MAX:
                raise ValueError(f"more than {KEYS_BYTES_MAX} bytes")
            found = self._jwt.PyJWKSet.from_dict(json.loads(data)).keys
        except (ValueError, AttributeError, TypeError, RecursionError, self._jwt.PyJWTError) as error:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"keys of the token issuer are invalid reason={str(error)[:200]!r} keys={self._provider.keys!r}",
            ) from None
        return {key.key_id: key for key in found if key.key_type != "oct" and key.public_key_use in (None, "sig")}

    def _fetch(self) -> None:
        if self._is_fetching:
            return
        self._is_fetching, self._fetched_at = True, self._clock.monotonic()
        self._run(self._fetch_now)

    def _fetch_now(self) -> None:
        from urllib.request import urlopen  # imported here, because it slows down the start and few brokers need it

        try:
            with urlopen(self._provider.keys, timeout=FETCH_S) as response:
                self._keys = self._parse(response.read(KEYS_BYTES_MAX + 1))
        except (OSError, ValueError, Invalid) as error:
            log.error("cannot fetch the keys of the token issuer", url=self._provider.keys, reason=str(error)[:200])
        finally:
            self._is_fetching = False

    def verify(self, token: str) -> tuple[str, int]:
        """Return the user's name and the time in microseconds at which the token expires.

        Raises Denied(LOGIN_FAILED). The error's message gives the reason, for the audit log.
        """
        if len(token) > TOKEN_BYTES_MAX:
            raise _denied(f"token is too long limit={TOKEN_BYTES_MAX}")
        provider, jwt = self._provider, self._jwt
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=provider.audience,
                issuer=provider.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise _denied(f"token is invalid reason={str(error)[:200]!r}") from None
        name = claims.get(provider.user_claim)
        if not isinstance(name, str) or not name:
            raise _denied(f"token has no user claim={provider.user_claim!r}")
        return name, int(claims["exp"] * 1_000_000)

    def _key(self, key_id: str | None) -> Any:
        """Return the key that has signed a token.

        If it is unknown, fetch the keys again for later logins, and raise Denied(LOGIN_FAILED).
        """
        keys = self._keys
        if key_id is None and len(keys) == 1:
            return next(iter(keys.values()))
        if key_id not in keys:
            now = self._clock.monotonic()
            if self._provider.is_remote and (self._fetched_at is None or now - self._fetched_at >= REFETCH_S):
                self._fetch()
            raise _denied(f"token has an unknown key key={key_id!r:.100}")
        return keys[key_id]


def _denied(message: str) -> Denied:
    return Denied(ErrorCode.LOGIN_FAILED, message)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="token-keys", daemon=True).start()
