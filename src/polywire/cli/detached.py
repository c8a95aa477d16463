"""``polywire serve --detach`` and ``polywire stop``: a broker in the background.

A detached broker has three files next to its data directory. They are named like the directory, with a suffix:

* ``.log``: its log lines.
* ``.ready``: its addresses, while it accepts connections.
* ``.pid``: its process id. The broker holds a lock on this file until it exits, so another process with the same id is
  not mistaken for it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final

from cyclopts import App

from polywire.cli.output import Failed, note
from polywire.cli.progress import reported
from polywire.cli.usage import DATA_DIR, DataDir, examples, settings_file
from polywire.server.config import ServeConfig

PRIVATE_MODE: Final = 0o600
POLL_S: Final = 0.02
PID_BYTES_MAX: Final = 9  # maximum number of digits in the .pid file; process ids are at most 2^22
STOP_S_MAX: Final = 60.0  # seconds to wait: enough for a broker to send pending responses and to sync its log

app = App(
    name="stop",
    help_epilogue=examples("polywire stop", "polywire stop --data-dir /var/lib/polywire"),
    config=settings_file,
)


@app.default
def stop(
    *,
    data_dir: DataDir = DATA_DIR,
) -> int:
    """Stop a broker that was started with polywire serve --detach, and wait until it has exited."""
    pid = running(data_dir)
    if pid is None:
        raise Failed(
            "no detached broker is running with this data directory (start one with polywire serve --detach, or use "
            f"--data-dir) data_dir={os.path.abspath(data_dir)!r}"
        )
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    with reported("stopping"):
        has_stopped = _wait(lambda: running(data_dir) is None, limit_s=STOP_S_MAX)
    if not has_stopped:
        raise Failed(f"the broker is still running (see {beside(data_dir, '.log')}) pid={pid} seconds={STOP_S_MAX:g}")
    note(f"stopped pid={pid}")
    return 0


def serve_detached(config: ServeConfig, serve: Callable[[ServeConfig], int]) -> int:
    """Run ``serve`` in a child process and return once it accepts connections. Raises Failed if it does not start."""
    data_dir = config.data_dir
    log, ready = beside(data_dir, ".log"), config.ready_file or beside(data_dir, ".ready")
    data_dir.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _locked(data_dir) as pid_file, open(log, "ab", opener=_open_private) as log_file:
        ready.unlink(missing_ok=True)
        start = log_file.tell()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _become_broker(replace(config, ready_file=ready), serve, log_file.fileno())
        try:
            # The parent writes it, so that polywire stop works even before the child has started.
            os.write(pid_file, b"%d\n" % child)
        except OSError as error:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Failed(
                f"cannot write the process id: {error.strerror} path={str(beside(data_dir, '.pid'))!r}"
            ) from error
    try:
        with reported("starting"):
            _wait(lambda: ready.exists() or _has_ended(child))
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    if not ready.exists():
        lines = log.read_bytes()[start:].decode("utf-8", "replace").splitlines()
        fallback = lines[-1] if lines else "it logged nothing"
        last = next((line for line in reversed(lines) if "level=error" in line), fallback)
        raise Failed(f"the broker did not start: {last.partition(' reason=')[2] or last} log={str(log)!r}")
    option = "" if data_dir == DATA_DIR else f" --data-dir {data_dir}"
    note(f"ready pid={child} log={str(log)!r}; end it with: polywire stop{option}")
    return 0


def running(data_dir: Path) -> int | None:
    """Return the process id of the detached broker of a data directory, or None if none is running."""
    with suppress(FileNotFoundError), open(beside(data_dir, ".pid"), "rb", opener=_open_pid) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            written = file.read(PID_BYTES_MAX + 1)
            return int(written) or None if len(written) <= PID_BYTES_MAX and written.strip().isdigit() else None
    return None


def beside(data_dir: Path, suffix: str) -> Path:
    """Return the path of a file next to a data directory.

    Raises Failed for the root directory, next to which there is none.
    """
    if data_dir.name in ("", ".."):  # "." and similar paths do not contain the directory's name
        data_dir = Path(os.path.abspath(data_dir))
    if not data_dir.name:
        raise Failed(f"the root directory cannot be a data directory (use --data-dir) data_dir={str(data_dir)!r}")
    return data_dir.with_name(data_dir.name + suffix)


@contextmanager
def _locked(data_dir: Path) -> Iterator[int]:
    """Lock the .pid file and yield its descriptor. Raises Failed if another process has locked it.

    A forked child shares the lock and holds it until it exits.
    """
    with open(beside(data_dir, ".pid"), "ab", opener=_open_pid) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            facts = f"pid={running(data_dir) or 'unknown'} data_dir={str(data_dir)!r}"
            raise Failed(f"a detached broker is already running (stop it with polywire stop) {facts}") from None
        file.truncate(0)
        yield file.fileno()


def _become_broker(config: ServeConfig, serve: Callable[[ServeConfig], int], log: int) -> None:
    code = 1
    try:
        os.setsid()  # so that closing the terminal does not kill the broker
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = serve(config)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_MODE)


def _open_pid(path: str, flags: int) -> int:
    """Open the .pid file. Raises Failed for a symbolic link, because its target would be truncated."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, PRIVATE_MODE)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise Failed(f"the .pid file is a symbolic link (remove it) path={path!r}") from None


def _has_ended(child: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitpid(child, os.WNOHANG)[0] == child
    return True


def _wait(condition: Callable[[], bool], *, limit_s: float = inf) -> bool:
    """Wait for a condition. Return whether it became true within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
