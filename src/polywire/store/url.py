"""Which bucket a URL means.

Promises: what cannot be a bucket is refused before anything is asked of it. Must not know: what the bucket is for.
"""

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
ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # where the library looks for a server other than Amazon's


def open_bucket(
    url: str, *, timeout_s: float = REQUEST_TIMEOUT_S, options: Mapping[str, str] | None = None, make: bool = True
) -> Objects:
    """The objects below a URL. Raises Invalid, OSError.

    Args:
        url: s3://, gs://, az:// or file:///, a bucket and a prefix.
        timeout_s: longest wait for one request, in seconds.
        options: of the client library, by its names; they go before what the environment says.
        make: make the directory of a file:/// URL where there is none.
    """
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "a bucket's URL has no credentials and no options: they come from the environment",
        )
    if parts.scheme == FILE:
        root = Path(unquote(parts.path))
        if parts.netloc or not root.is_absolute():
            raise Invalid(ErrorCode.INVALID_REQUEST, f"a directory is file:///absolute/path got={url!r}")
        if make:
            make_directories(SYSTEM_FILES, root)
        return FileObjects(root)
    if parts.scheme not in SCHEMES or not parts.netloc:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"a bucket is s3://, gs://, az:// or file:/// and a name got={url!r}")
    given = dict(options or {})
    endpoints = [given[ENDPOINT]] if ENDPOINT in given else [os.environ.get(name, "") for name in ENDPOINTS]
    plain = any(endpoint.startswith("http://") for endpoint in endpoints)
    return connect(url, timeout_s=timeout_s, allow_http=plain, options=given)
