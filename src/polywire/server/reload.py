"""SIGHUP: take up the users file, the certificate and the audit log's file anew, while everybody is served.

Promises: what cannot be taken up is told of and stays as it was; a broker that has users keeps some; nobody but whose user changed is
disconnected. Must not know: any wire, signals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from polywire.broker.access import Access
from polywire.errors import BrokerError
from polywire.server.audit import AuditLog
from polywire.server.tls import ServerTls
from polywire.server.users import load_users

log = structlog.get_logger("polywire.server")


class Reload:
    """What a broker takes up anew when it is told to."""

    __slots__ = ("_access", "_audit", "_tls", "_users")

    def __init__(self, access: Access, users: Path | None, tls: ServerTls | None, audit: AuditLog) -> None:
        self._access = access
        self._users = users
        self._tls = tls
        self._audit = audit

    def __call__(self) -> None:
        """Take up what has changed."""
        self._try("audit log", self._audit.reopen)
        if self._users is not None:
            self._try("users", self._take_users)
        if self._tls is not None:
            self._try("certificate", self._tls.reload)
        log.info("reloaded")

    def _take_users(self) -> None:
        assert self._users is not None, "there is a users file"
        self._access.configure(load_users(self._users))

    def _try(self, what: str, take: Callable[[], None]) -> None:
        try:
            take()
        except BrokerError as error:
            log.error("reload failed, keeping the previous state", what=what, reason=error.message)
        except OSError as error:
            log.error(
                "reload failed, keeping the previous state", what=what, reason=error.strerror, file=error.filename
            )
