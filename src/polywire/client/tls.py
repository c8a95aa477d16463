"""TLS for clients, which ``+tls`` in a URL selects.

The broker's certificate and host name are verified. Trusted authorities are those of the system, or those in
``SSL_CERT_FILE`` and ``SSL_CERT_DIR``.
"""

from __future__ import annotations

import ssl
from typing import Any, Final

SCHEME_SUFFIX: Final = "+tls"


def client_context() -> ssl.SSLContext:
    """Return a context for TLS 1.2 and newer that verifies certificates and host names.

    Trusted authorities are those of the system, or those in the environment variables ``SSL_CERT_FILE`` and
    ``SSL_CERT_DIR``.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def secured(context: ssl.SSLContext | None, host: str) -> dict[str, Any]:
    """Return the arguments of ``create_connection`` for TLS to this host, or no arguments if ``context`` is None."""
    return {} if context is None else {"ssl": context, "server_hostname": host}
