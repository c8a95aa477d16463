"""Objects in Amazon S3, Google Cloud Storage, Azure and compatible servers, through obstore.

Each call sends exactly one request and never retries it. If a client library retried a create whose response was lost,
it would report that another process had created the object. Call these functions from threads only. They release the
GIL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.matching import consists_of
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Stored, check_object_name
from polywire.types import Buffer

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import ObjectStore

# for journal objects and other small ones; during a longer wait a standby would take over
REQUEST_TIMEOUT_S: Final = 8
CONNECT_TIMEOUT_S: Final = 4
JOINED_BYTES_MAX: Final = 256 * 1024  # objects up to this size are joined in memory instead of sent in parts
SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "https")
DIGITS: Final = "0123456789"
HEX: Final = DIGITS + "abcdef"
DIGEST_DIGITS: Final = 32
TAG_MIN: Final = 12  # length of the shortest ETag of Azure or Google
_SEPARATOR: Final = "/"


def connect(
    url: str,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    allow_http: bool = False,
    options: Mapping[str, str] | None = None,
) -> Bucket:
    """Return the bucket of a URL.

    Credentials, region and endpoint come from ``options``, the environment or the machine's role.

    Raises:
        Invalid: the library is not installed, or the URL or options are wrong.
    """
    try:
        import obstore.store as stores
        from obstore.exceptions import BaseError
    except ImportError:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"bucket support is not installed: pip install 'polywire[bucket]'  url={url!r}"
        ) from None
    settings: dict[str, Any] = {
        **(options or {}),
        "client_options": {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "allow_http": allow_http,
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
    }
    # TLS protects each body; without it, the store compares the body with the digest in the signature (0.7 ms per MiB)
    if url.startswith("s3"):
        settings["unsigned_payload"] = not allow_http
    try:
        return Bucket(stores.from_url(url, **settings))
    except (BaseError, ValueError) as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"cannot use this bucket: {_reason(error)} url={url!r}") from error


class Bucket:
    """Implements ``Objects`` on an object store."""

    __slots__ = ("_store",)

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        import obstore

        check_object_name(name)
        size = sum(map(len, parts))
        content = b"".join(parts) if size < JOINED_BYTES_MAX else iter(parts)
        with _errors("create", name, exists=BlobExists):
            made = obstore.put(self._store, name, content, mode="create", use_multipart=False)
            self._check_stored(name, size, made)

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        import obstore

        check_object_name(name)
        e_tag, _, version = tag.partition("\n")
        with _errors("replace", name, exists=ObjectChanged, missing=ObjectChanged):
            mode: obstore.UpdateVersion = {"e_tag": e_tag, "version": version} if version else {"e_tag": e_tag}
            made = obstore.put(self._store, name, bytes(content), mode=mode, use_multipart=False)
            self._check_stored(name, len(content), made)

    def put(self, name: str, content: Buffer) -> None:
        import obstore

        check_object_name(name)
        with _errors("put", name):
            made = obstore.put(self._store, name, bytes(content), mode="overwrite", use_multipart=False)
            self._check_stored(name, len(content), made)

    def _check_stored(self, name: str, size: int, made: PutResult) -> None:
        """Check that an object was stored if the response to its write has an ETag that no object store would send.

        A proxy may answer a write with status 200 and its own page. Raises Unavailable if the object is missing.
        """
        import obstore

        tag = made["e_tag"]
        if tag is not None and _is_of_a_store(tag.strip('"')):
            return
        found = obstore.head(self._store, name)
        if found["size"] != size or found["e_tag"] != tag:
            raise Unavailable(
                ErrorCode.STORAGE_FAILED,
                "the store confirmed a put but the object is missing (check for a proxy in front of the endpoint)"
                f" name={name!r} e_tag={tag!r}",
            )

    def read(self, name: str) -> Stored:
        import obstore

        check_object_name(name)
        with _errors("read", name, missing=BlobMissing):
            found = obstore.get(self._store, name)
            meta = found.meta
            return Stored(bytes(found.bytes()), f"{meta['e_tag'] or ''}\n{meta['version'] or ''}")

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        import obstore

        check_object_name(name)
        if start >= stop:
            return b""
        with _errors("read", name, missing=BlobMissing):
            found = obstore.get(self._store, name, options={"range": (start, stop)})
            return bytes(found.bytes())

    def size(self, name: str) -> int:
        import obstore

        check_object_name(name)
        with _errors("measure", name, missing=BlobMissing):
            return obstore.head(self._store, name)["size"]

    def list(self, prefix: str) -> list[str]:
        import obstore

        with _errors("list", prefix):
            pages = obstore.list(self._store, prefix.rstrip(_SEPARATOR) or None)
            return sorted(item["path"] for page in pages for item in page if item["path"].startswith(prefix))

    def delete(self, name: str) -> None:
        import obstore

        check_object_name(name)
        try:
            with _errors("delete", name, missing=BlobMissing):
                obstore.delete(self._store, name)
        except BlobMissing:
            return


def _is_of_a_store(tag: str) -> bool:
    """Return whether an ETag is 32 hexadecimal digits (S3), a counter (Azure) or a generation (Google)."""
    digest, _, parts = tag.partition("-")
    if len(digest) == DIGEST_DIGITS and consists_of(digest, HEX) and consists_of(parts, DIGITS):
        return True
    return len(tag) >= TAG_MIN and (tag.startswith("0x") or tag.endswith("="))


@contextmanager
def _errors(
    what: str, name: str, *, exists: type[Exception] | None = None, missing: type[Exception] | None = None
) -> Iterator[None]:
    """Convert errors of the client library: failed conditions, missing objects, and Unavailable for everything else.

    Args:
        what: verb for the error message.
        name: name of the object.
        exists: raised for status 409 and 412, which report a failed condition. None for requests without a condition.
        missing: raised for status 404. None for requests without an existing object. Then 404 means that the
            bucket is missing.
    """
    from obstore import exceptions

    try:
        yield
    except (exceptions.BaseError, OSError, ValueError) as error:
        if exists is not None and isinstance(error, (exceptions.AlreadyExistsError, exceptions.PreconditionError)):
            raise exists(name) from None
        if missing is not None and isinstance(error, (exceptions.NotFoundError, FileNotFoundError)):
            raise missing(name) from None
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"cannot {what} object: {_reason(error)} name={name!r}") from error


def _reason(error: BaseException) -> str:
    """Return the first line of the library's message. Other lines list causes."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
