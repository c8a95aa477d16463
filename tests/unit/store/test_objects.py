"""The bucket port: the same scenarios for every implementation, and fault injection of the one in memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polywire.errors import Invalid, Unavailable
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.bucket import Bucket
from polywire.store.file_objects import FileObjects
from polywire.store.objects import ObjectChanged, Objects, Rooted
from polywire.store.system_files import SystemFiles
from polywire.store.url import open_bucket
from polywire.testing.memory_objects import MemoryObjects, ObjectFault
from tests.s3_server import BUCKET, s3_server


@pytest.fixture(params=["memory", "files", "rooted", "library", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    match request.param:
        case "memory":
            yield MemoryObjects()
        case "files":
            yield FileObjects(tmp_path)
        case "rooted":
            others = MemoryObjects()
            for name in ("a/b/one", "floor", "journal/1", "shards/0001/floor", "shards/00001/floor"):
                others.put(name, b"foreign")
            yield Rooted(others, "shards/0000/")
        case "library":
            stores = pytest.importorskip("obstore.store", reason="buckets need the extra `bucket`")
            yield Bucket(stores.MemoryStore())
        case _:
            pytest.importorskip("obstore", reason="buckets need the extra `bucket`")
            with s3_server(tmp_path / "s3") as environment:
                for name, value in environment.items():
                    monkeypatch.setenv(name, value)
                yield open_bucket(f"s3://{BUCKET}/some/prefix")


def test_a_name_is_created_once(objects: Objects) -> None:
    objects.create("a/b/one", [b"first ", memoryview(b"content")])
    with pytest.raises(BlobExists):
        objects.create("a/b/one", [b"second"])
    assert objects.read("a/b/one").content == b"first content"
    assert objects.size("a/b/one") == 13
    assert objects.read_range("a/b/one", 6, 9) == b"con"
    assert objects.read_range("a/b/one", 10, 99) == b"ent"
    assert objects.read_range("a/b/one", 4, 4) == b""


def test_an_object_is_replaced_only_with_its_current_tag(objects: Objects) -> None:
    objects.create("floor", [b"1"])
    first = objects.read("floor")
    objects.replace("floor", b"2", first.tag)
    with pytest.raises(ObjectChanged):
        objects.replace("floor", b"3", first.tag)
    assert objects.read("floor").content == b"2"
    objects.replace("floor", memoryview(b"4"), objects.read("floor").tag)
    assert objects.read("floor").content == b"4"
    with pytest.raises(ObjectChanged):
        objects.replace("none", b"3", first.tag)


def test_a_put_replaces_anything(objects: Objects) -> None:
    for content in (b"one", b"two"):
        objects.put("nodes/a", content)
        assert objects.read("nodes/a").content == content


def test_deleted_objects_are_missing(objects: Objects) -> None:
    objects.create("journal/1", [b"x"])
    objects.delete("journal/1")
    objects.delete("journal/1")
    for read in (objects.read, objects.size):
        with pytest.raises(BlobMissing):
            read("journal/1")
    with pytest.raises(BlobMissing):
        objects.read_range("journal/1", 0, 1)
    objects.create("journal/1", [b"y"])
    assert objects.read("journal/1").content == b"y"


def test_names_are_listed_by_directory(objects: Objects) -> None:
    for name in ("s/2", "s/1", "t/3"):
        objects.create(name, [b"x"])
    assert (objects.list("s/"), objects.list("none/")) == (["s/1", "s/2"], [])


def test_nothing_is_written_if_the_directory_has_disappeared(tmp_path: Path) -> None:
    """As if it was unmounted. A broker must not take this for a missing object."""
    objects = FileObjects(tmp_path / "bucket")
    objects.put("nodes/a", b"1")
    tag = objects.read("nodes/a").tag
    (tmp_path / "bucket").rename(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="disappeared"):
        objects.put("nodes/a", b"2")
    with pytest.raises(Unavailable, match="disappeared"):
        objects.create("nodes/b", [b"2"])
    with pytest.raises(ObjectChanged):
        objects.replace("nodes/a", b"2", tag)
    assert not (tmp_path / "bucket").exists()


def test_a_directory_that_cannot_be_listed_is_unavailable(tmp_path: Path) -> None:
    class Failing(SystemFiles):
        def names(self, path: Path) -> list[str]:
            raise OSError(errno.EIO, "Input/output error", str(path))

    with pytest.raises(Unavailable, match="cannot list object: Input/output error"):
        FileObjects(tmp_path, Failing()).list("s/")


@pytest.mark.parametrize("name", ["", "/a", "a//b", "a/../b", "a/.", "a b", "ä", "a/" + "b" * 300])
def test_invalid_names_are_refused(objects: Objects, name: str) -> None:
    with pytest.raises(Invalid):
        objects.create(name, [b"x"])


def test_one_of_many_concurrent_creators_succeeds(objects: Objects) -> None:
    objects.create("tag", [b"0"])
    tag = objects.read("tag").tag
    won: list[str] = []
    start = threading.Barrier(8)

    def race(number: int) -> None:
        start.wait()
        for what in ("create", "replace"):
            try:
                if what == "create":
                    objects.create("new", [b"%d" % number])
                else:
                    objects.replace("tag", b"%d" % (number + 1), tag)
            except (BlobExists, ObjectChanged, Unavailable):
                continue
            won.append(what)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == ["create", "replace"]


@pytest.mark.parametrize(
    "url",
    ["", "ftp://host/x", "s3:///x", "file://host/x", "file:relative", "s3://key:secret@bucket", "s3://b?x=1", "x"],
)
def test_invalid_bucket_urls_are_refused(url: str) -> None:
    with pytest.raises(Invalid):
        open_bucket(url)


def test_faults_take_effect_once_and_in_order() -> None:
    objects = MemoryObjects()
    objects.fail("create", ObjectFault.REFUSED)
    objects.fail("create", ObjectFault.LOST_REPLY)
    objects.fail("create", ObjectFault.BUSY)
    with pytest.raises(Unavailable):
        objects.create("a", [b"x"])
    assert objects.list("") == []
    with pytest.raises(Unavailable):
        objects.create("a", [b"x"])
    assert objects.read("a").content == b"x"
    with pytest.raises(BlobExists):
        objects.create("b", [b"x"])
    assert objects.list("") == ["a"]
    objects.create("b", [b"x"])


def test_delayed_requests_take_effect_when_they_are_delivered() -> None:
    objects = MemoryObjects()
    objects.fail("create", ObjectFault.LATE)
    objects.fail("create", ObjectFault.LATE, after=1)
    memory = bytearray(b"x")
    with pytest.raises(Unavailable):
        objects.create("a", [memory])
    memory[:] = b"y"
    objects.create("b", [b"x"])
    with pytest.raises(Unavailable):
        objects.create("b", [b"late"])
    assert objects.list("") == ["b"]
    objects.deliver()
    assert (objects.read("a").content, objects.read("b").content) == (b"x", b"x")


def test_stale_lists_and_slow_responses() -> None:
    waits: list[int] = []
    objects = MemoryObjects(wait=lambda: waits.append(1))
    objects.fail("list", ObjectFault.STALE)
    objects.fail("create", ObjectFault.DELAY)
    objects.create("a", [b"x"])
    assert (waits, objects.list(""), objects.list("")) == ([1], [], ["a"])


class Unknown(BaseHTTPRequestHandler):
    """A server that replies 404 to everything, like a proxy before a server that is gone."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_writing_to_a_missing_bucket_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="buckets need the extra `bucket`")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Unknown)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "REGION": "us-east-1"}
    for name, value in (environment | {"ACCESS_KEY_ID": "user", "SECRET_ACCESS_KEY": "secret"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        bucket = open_bucket("s3://nothing/prefix")
        with pytest.raises(Unavailable, match="404"):
            bucket.create("journal/1", [b"content"])
        with pytest.raises(Unavailable, match="404"):
            bucket.put("nodes/one", b"content")
    finally:
        server.shutdown()
        server.server_close()
