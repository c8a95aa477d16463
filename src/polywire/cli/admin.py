"""The client of a broker's admin API over HTTP, and the ``--http`` option."""

from __future__ import annotations

import json
import os
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated, Any, Final
from urllib.parse import quote, urlsplit

from cyclopts import Parameter, Token

from polywire.cli.output import Failed
from polywire.client.address import SCHEME_SUFFIX, Login, split_address, split_brokers, split_login
from polywire.client.failures import cannot_connect
from polywire.errors import Unavailable
from polywire.types import spell_address

HTTP_PORT: Final = 9080
HTTP_SCHEMES: Final = ("http://", "https://")
HTTP_DEFAULT: Final = f"http://127.0.0.1:{HTTP_PORT}"
TIMEOUT_S: Final = 30.0  # creating a link waits for its source

HTTP_VARIABLE: Final = "POLYWIRE_HTTP"
HTTP_HELP: Final = (
    "Address of the broker's HTTP listener. Defaults to port 9080 of the host in POLYWIRE_ADDRESS, or of this machine. "
    "With http://name@host:port, the password is read from POLYWIRE_PASSWORD."
)


class GuessedUrl(str):
    """An HTTP address that was derived from the address for clients."""

    __slots__ = ()


def _http_url(_: type, tokens: Sequence[Token]) -> str:
    token = tokens[-1]
    is_client_address = token.keyword in CLIENT_ADDRESS and not token.value.startswith(HTTP_SCHEMES)
    return GuessedUrl(default_http(token.value)) if is_client_address else token.value


CLIENT_ADDRESS: Final = ("--address", "-a")
HttpAddress = Annotated[
    str | None,
    Parameter(
        name=("--http", *CLIENT_ADDRESS),
        env_var=HTTP_VARIABLE,
        converter=_http_url,
        help=f"{HTTP_HELP} With --address polywire://host:port, port 9080 of that host is used; an http address is used as it is.",
    ),
]
"""The options of a command that uses only the admin API."""
HttpListener = Annotated[str | None, Parameter(env_var=HTTP_VARIABLE, help=HTTP_HELP)]
"""The option of a command that also connects to ``--address``."""


def default_http(address: str) -> str:
    """Return the default HTTP address for a client address: port 9080 of the same host.

    It uses TLS if the client address does.
    """
    if not address:
        return HTTP_DEFAULT
    first = split_brokers(address)[0]
    scheme, _, rest = first.rpartition("://")
    login, at, location = rest.rpartition("@")
    host, _ = split_address(location.partition("?")[0])
    secure = "s" if scheme.endswith(SCHEME_SUFFIX) else ""
    return f"http{secure}://{login}{at}{spell_address(host, HTTP_PORT)}"


class AdminApi:
    """The admin API of one broker."""

    def __init__(self, url: str | None) -> None:
        """Without a URL, that of the environment is used. Raises Failed for an invalid one."""
        self._is_guessed: Final = not url or isinstance(url, GuessedUrl)
        url = url or default_http(os.environ.get("POLYWIRE_ADDRESS", ""))
        login, without_login = split_login(url)
        parts = urlsplit(without_login)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise Failed(f"address is invalid (use http://host:port or https://host:port) got={without_login!r}")
        self._secure: Final = parts.scheme == "https"
        self._host: Final = parts.hostname
        self._port: Final = port or (443 if self._secure else 80)
        self._headers: Final = {} if login is None else {"Authorization": _basic(login)}

    def get(self, paths: Sequence[str]) -> Mapping[str, Any]:
        """Return the responses of these paths. Raises Failed, and Unavailable if the broker does not answer."""
        found: Mapping[str, Any] = self._ask(
            lambda connection: {path: self._request(connection, "GET", path) for path in paths}
        )
        return found

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the response of one request. Raises Failed, and Unavailable if the broker does not answer."""
        return self._ask(lambda connection: self._request(connection, method, path, body))

    def _ask(self, work: Callable[[HTTPConnection], Any]) -> Any:
        connection: HTTPConnection = (
            HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=ssl.create_default_context())
            if self._secure
            else HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        )
        try:
            return work(connection)
        except OSError as error:
            failure = cannot_connect(error, self._host, self._port)
            if self._is_guessed:
                advice = "name the broker's HTTP listener with --http or POLYWIRE_HTTP"
                raise Unavailable(failure.code, f"{failure.message} ({advice})") from None
            if not self._secure:
                raise failure from None
            at = f"http://{spell_address(self._host, self._port)}"
            raise Failed(f"{failure.message} (if the HTTP listener has no TLS, use --http {at})") from None
        except (HTTPException, ValueError) as error:
            raise Failed(
                f"the server is not the HTTP listener of a broker address={self._host}:{self._port}"
            ) from error
        finally:
            connection.close()

    def _request(
        self, connection: HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Any:
        headers = {**self._headers, "X-Polywire": "1", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body)
        connection.request(method, f"/api/v1/{quote(path)}", body=content, headers=headers)
        response = connection.getresponse()
        found = json.loads(response.read())
        if response.status != 200:
            raise Failed(f"{found['error']['message']} path={path}")
        return found


def _basic(login: Login) -> str:
    return f"Basic {b64encode(f'{login.name}:{login.password}'.encode()).decode()}"
