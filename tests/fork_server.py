"""Processes of ``polywire`` that are forks of one process, the fork server, which has imported it.

``popen`` and ``run`` replace those of ``subprocess``. A fork takes a third of the processor time of ``python -m polywire``.
It has the same streams, directory, environment, signals and exit. It differs in these aspects:

* its parent is the fork server, and its command line (``ps``) and hash seed are those of the server;
* it has loaded the modules of other commands.

Tests of these aspects, of starts and of other interpreters use ``subprocess``, as do all callers whose environment
influences the interpreter. The server has one thread and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

from polywire.testing.process import child_environment

MODULES: Final = ("polywire", "tests.eager_broker")  # that can be run
PRELOADED: Final = (
    "polywire.cli.main",
    "polywire.cli.serve",
    "polywire.cli.topic",
    "polywire.cli.record",
    "polywire.cli.group",
    "polywire.cli.link",
    "polywire.cli.cluster",
    "polywire.cli.doctor",
    "polywire.cluster.opening",  # a broker with a bucket imports these three
    "polywire.server.processes",
    "polywire.server.standby",
    "rich.console",
    "uvloop",
)
ROOT: Final = Path(__file__).parents[1]
REQUEST_BYTES_MAX: Final = 200_000  # a message of a socket, mostly environment
STREAMS: Final = 3
DESCRIPTORS_MAX: Final = 1 << 20
NUMBER: Final = struct.Struct("i")
# Prefixes of variables that the interpreter, the C library or an import reads, so that a fork has the server's.
READ_EARLY: Final = (
    "CLICOLOR", "COVERAGE", "FORCE_COLOR", "GLIBC_", "HOME", "LANG", "LC_", "LD_", "MALLOC_", "NO_COLOR", "POLYWIRE_PURE",
    "PYTHON", "TERM", "TZ", "XDG_",
)  # fmt: skip
ENDED: Final = "the fork server ended"
ENVIRONMENT: Final = child_environment()  # of the server, before any test changes a variable
OPTIONS: Final = {"cwd", "encoding", "env", "errors", "stderr", "stdin", "stdout", "text"}


class Request(NamedTuple):
    """The process to start."""

    module: str
    words: list[str]
    directory: str
    environment: dict[str, str]


class _Forked(subprocess.Popen[Any]):
    """A child of the fork server, which reports its id and its exit status through a pipe."""

    def _execute_child(
        self, args: Sequence[str], _executable: object, _preexec: object, _close: object, _pass: object, cwd: str | None,
        env: Mapping[str, str] | None, _info: object, _flags: object, _shell: object, p2cread: int, p2cwrite: int,
        c2pread: int, c2pwrite: int, errread: int, errwrite: int, *_: object,
    ) -> None:  # fmt: skip
        """Start the process; called by ``Popen.__init__``."""
        module, *words = args[2:]
        request = Request(module, words, os.fspath(cwd or os.getcwd()), dict(os.environ if env is None else env))
        streams = [own if other == -1 else other for own, other in enumerate((p2cread, c2pwrite, errwrite))]
        self._status, reported = os.pipe()
        try:
            socket.send_fds(_control(), [json.dumps(request).encode()], [reported, *streams])
        except OSError as error:
            raise AssertionError(ENDED) from error
        finally:
            os.close(reported)
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid = self._read()
        self._child_created = True

    def _read(self) -> int:
        number = os.read(self._status, NUMBER.size)
        assert number, ENDED
        return int(NUMBER.unpack(number)[0])

    def _internal_poll(self, _deadstate: object = None) -> int | None:
        if self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return the process id and status, or zeros if it runs or has been waited for; like ``os.waitpid``."""
        if self.returncode is not None:
            return 0, 0
        ended = select.poll()
        ended.register(self._status, select.POLLIN)
        if not ended.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = self._read()
        os.close(self._status)
        return self.pid, status


_lock: Final = Lock()
_servers: Final[list[socket.socket]] = []


def _control() -> socket.socket:
    """Return the connection to the server of this process, which the first call starts."""
    with _lock:
        if not _servers:
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its:
                command = [sys.executable, "-m", __name__, str(its.fileno())]
                server = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, cwd=ROOT, env=ENVIRONMENT, pass_fds=[its.fileno()]
                )
            _servers.append(ours)
            atexit.register(server.wait)
            atexit.register(ours.close)
        return _servers[0]


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process as ``subprocess.Popen`` does: a fork, if that makes no difference to the program."""
    made = _Forked if _is_equal(command, options) else subprocess.Popen
    return made(command, **options)


def run(
    command: Sequence[str], *, input: str | bytes | None = None, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command as ``subprocess.run`` does with ``capture_output``."""
    pipe = subprocess.PIPE
    options |= {"stdout": pipe, "stderr": pipe} | ({} if input is None else {"stdin": pipe})
    with popen(command, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _is_equal(command: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Return whether a fork runs the command as a new interpreter would."""
    if not hasattr(os, "pidfd_open") or "COVERAGE_PROCESS_CONFIG" in os.environ or not options.keys() <= OPTIONS:
        return False
    given = dict(os.environ if options.get("env") is None else options["env"])
    differing = {name for name, _ in given.items() ^ ENVIRONMENT.items()}
    return (
        list(command[:2]) == [sys.executable, "-m"]
        and command[2] in MODULES
        and not any(name.startswith(READ_EARLY) for name in differing)
    )


def serve(control: socket.socket) -> Request | None:
    """Fork for each request; return the request in the new process, and None in the server when its owner ends."""
    poller, running, ended = select.poll(), dict[int, int](), dict[int, int]()
    poller.register(control, select.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready in running:
                reported = running.pop(ready)
                poller.unregister(ready)
                poller.register(reported, 0)  # an error when the other end is closed
                ended[reported] = _report_end(ready, reported)
                continue
            if ready in ended:
                poller.unregister(ready)
                os.close(ready)
                os.waitpid(ended.pop(ready), 0)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES_MAX, STREAMS + 1)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                control.detach()
                return _become(Request(*json.loads(message)), descriptors[1:])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            os.write(descriptors[0], NUMBER.pack(pid))
            pidfd = os.pidfd_open(pid)
            running[pidfd] = descriptors[0]
            poller.register(pidfd, select.POLLIN)


def _report_end(pidfd: int, reported: int) -> int:
    """Report the status of a process that has ended, and return its id.

    The process remains a zombie until its owner has read the status. Otherwise another process could get its id, and a
    signal of a test would reach that one.
    """
    end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    assert end is not None, "it has ended"
    os.close(pidfd)
    status = end.si_status << 8 if end.si_code == os.CLD_EXITED else end.si_status
    with suppress(BrokenPipeError):  # its owner no longer waits
        os.write(reported, NUMBER.pack(status))
    return end.si_pid


def _become(request: Request, streams: Sequence[int]) -> Request:
    """Give this process the streams, directory, environment and signals of the request, and no other descriptors."""
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
    os.closerange(STREAMS, DESCRIPTORS_MAX)
    os.chdir(request.directory)
    sys.path[0] = request.directory
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return request


def main() -> None:
    """Import everything, then serve; in a new process, run its module and end as the module does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that started this one
    for name in PRELOADED:
        import_module(name)
    gc.freeze()  # otherwise each process visits and copies all objects when it ends
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        sys.argv = ["-m", *request.words]
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
