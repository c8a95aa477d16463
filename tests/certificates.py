"""Certificates for tests, made with openssl, as strict as RFC 5280 and strict clients require."""

from __future__ import annotations

import socket
import ssl
import subprocess
from pathlib import Path
from typing import Final

AUTHORITY: Final = "authority"
HERE: Final = "IP:127.0.0.1,DNS:localhost"
DAYS: Final = 2
EXPIRED: Final = ("-not_before", "20200101000000Z", "-not_after", "20200102000000Z")


class Certificates:
    """An authority, and its signed certificates of a server and a client."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.make_authority(AUTHORITY)
        self.sign("server", HERE)
        self.sign("client", "DNS:client")

    def path(self, name: str, kind: str = "pem") -> str:
        """Return the path of a file of this name."""
        return str(self.directory / f"{name}.{kind}")

    def make_authority(self, name: str) -> None:
        """Create another authority that no client trusts yet."""
        signs = ("-addext", "keyUsage=critical,keyCertSign")
        days = ("-days", str(DAYS))
        self._openssl("req", "-x509", "-nodes", *self._key(name), *days, "-subj", f"/CN={name}", *signs)

    def sign(self, name: str, alternative: str, *, authority: str = AUTHORITY, days: int = DAYS, use: str = "") -> None:
        """Create a key and a signed certificate.

        alternative: its names. days: validity, negative if expired. use: its purpose, if restricted.
        """
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        uses = f"extendedKeyUsage={use}\n" if use else ""
        extensions.write_text(f"subjectAltName={alternative}\nauthorityKeyIdentifier=keyid\n{uses}")
        self._openssl("req", "-nodes", *self._key(name, request), "-subj", f"/CN={name}")
        signed = ("-CA", self.path(authority), "-CAkey", self.path(authority, "key"), "-CAcreateserial")
        files = ("-in", str(request), "-out", self.path(name), "-extfile", str(extensions))
        try:
            self._openssl("x509", "-req", *files, *signed, "-days", str(days))
        except subprocess.CalledProcessError:  # since version 3.4, days must not be negative
            self._openssl("x509", "-req", *files, *signed, *EXPIRED)

    def context(self, own: str | None = None) -> ssl.SSLContext:
        """Return a client's context: the trusted authority and its own certificate."""
        context = ssl.create_default_context(cafile=self.path(AUTHORITY))
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of Python 3.13
        if own is not None:
            context.load_cert_chain(self.path(own), self.path(own, "key"))
        return context

    def serial_shown(self, place: tuple[str, int], own: str) -> str:
        """Return the serial number of the certificate presented to a client with ``own``."""
        with (
            socket.create_connection(place, timeout=60) as plain,
            self.context(own).wrap_socket(plain, server_hostname="localhost") as peer,
        ):
            found = peer.getpeercert()
            assert found is not None
            return str(found["serialNumber"])

    def _key(self, name: str, out: Path | None = None) -> tuple[str, ...]:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        return (*curve, "-keyout", self.path(name, "key"), "-out", str(out or self.path(name)))

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)
