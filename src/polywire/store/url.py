"""Open the bucket that a URL names. An invalid URL is refused before any request is sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from polywire.errors import ErrorCode, Invalid
from polywire.store.bucket import REQUEST_TIMEOUT_S, SCHEMES, connect
from polywire.store.file_objects import FileObjects
from polywire.store.files import make_directories
from polywire.store.objects import Objects
from polywire.store.system_files import SYSTEM_FILES

FILE: Final = "file"
ENDPOINT: Final = "endpoint"
# variables in which the library looks for an endpoint other than Amazon's
ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def check_bucket_url(url: str) -> None:
    """Raise Invalid(INVALID_REQUEST) if ``open_bucket`` would refuse the URL."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        message = "bucket URL contains credentials or options: set them in the environment"
    elif parts.scheme == FILE:
        if not parts.netloc and Path(unquote(parts.path)).is_absolute():
            return
        message = f"invalid directory URL (use file:///absolute/path) url={url!r}"
    elif parts.scheme not in SCHEMES or not parts.netloc:
        message = f"invalid bucket URL (use s3://, gs:// or az:// with a bucket name, or file:///) url={url!r}"
    else:
        return
    raise Invalid(ErrorCode.INVALID_REQUEST, message)


def open_bucket(
    url: str, *, timeout_s: float = REQUEST_TIMEOUT_S, options: Mapping[str, str] | None = None, make: bool = True
) -> Objects:
    """Return the objects of a bucket below a URL.

    Args:
        url: s3://, gs:// or az:// with bucket and prefix, or file:///absolute/path.
        timeout_s: longest wait for one request, in seconds.
        options: options of the client library, with its names. They override the environment.
        make: create the directory of a file:/// URL if it does not exist.

    Raises:
        Invalid: the URL is wrong.
        OSError: the directory cannot be created.
    """
    check_bucket_url(url)
    parts = urlsplit(url)
    if parts.scheme == FILE:
        root = Path(unquote(parts.path))
        if make:
            make_directories(SYSTEM_FILES, root)
        return FileObjects(root)
    settings = dict(options or {})
    endpoints = [settings[ENDPOINT]] if ENDPOINT in settings else [os.environ.get(name, "") for name in ENDPOINTS]
    plain = any(endpoint.startswith("http://") for endpoint in endpoints)
    return connect(url, timeout_s=timeout_s, allow_http=plain, options=settings)
