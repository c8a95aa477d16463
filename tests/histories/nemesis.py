"""Faults during histories: brokers are killed, paused, and starved of disk, files and memory.

Clients are killed, too. The seed determines the order. A broker that was killed or gave up is restarted, and resources are restored. A
broker without a fault must not end.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.broker_process import BrokerProcess
from tests.histories.clocks import JUMP, JUMPED_S, JUMPS, SkewedClock
from tests.histories.driven import Driven
from tests.histories.history import Fault, History

DISK_MIB: Final = 448  # a broker keeps 256 MiB free, and creates two slots at its start
LEFT_BYTES: Final = 64 * 1024
MEMORY_LEFT_BYTES: Final = 1 << 20
PAUSES_S: Final = (0.1, 1.5)
PAUSE_S: Final = 1.0  # that the broker survives
STARTS_MAX: Final = 5  # consecutive starts that may fail because of faults


class SmallDisk:
    """A data directory on a file system in memory; ``here`` says whether this process may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "histories", str(folder)]
        self.here: Final = subprocess.run(command, capture_output=True, check=False).returncode == 0
        self._ballast: Final = folder / ".ballast"

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.here:
            subprocess.run(["umount", "--lazy", str(self.folder)], capture_output=True, check=False)

    def fill(self, left_bytes: int) -> None:
        """Leave only that much space."""
        found = os.statvfs(self.folder)
        size = max(0, found.f_bavail * found.f_frsize - left_bytes)
        with self._ballast.open("wb") as file, suppress(OSError):  # the broker may have allocated some meanwhile
            os.posix_fallocate(file.fileno(), 0, max(1, size))

    def empty(self) -> None:
        """Free the space again."""
        self._ballast.unlink(missing_ok=True)


class Nemesis:
    """All faults of one broker."""

    def __init__(
        self,
        broker: BrokerProcess,
        disk: SmallDisk,
        clients: Sequence[Driven],
        history: History,
        chance: random.Random,
        clock: SkewedClock | None = None,
    ) -> None:
        self._broker: Final = broker
        self._clock: Final = clock
        self._disk: Final = disk
        self._clients: Final = clients
        self._history: Final = history
        self._chance: Final = chance
        self._starved = False  # it may give up, and take time for it
        deeds: Mapping[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill": (10, self._kill),
            "kill in a start": (3, self._kill_in_a_start),
            "pause": (4, self._pause),
            "kill a client": (2 if clients else 0, self._kill_a_client),
            "no more memory": (1, self._no_memory),
            "no longer files": (1, self._no_longer_files),
            "full disk": (2 if disk.here else 0, self._full_disk),
            "no disk at all": (1 if disk.here else 0, self._no_disk),
            JUMP: (8 if clock is not None else 0, self._jump),
        }
        self._deeds: Final = {name: deed for name, (_, deed) in deeds.items()}
        self._weights: Final = [weight for weight, _ in deeds.values()]

    async def act(self) -> None:
        """Inject one fault, and make sure that a broker runs afterwards."""
        if self._broker.stopped:
            assert self._starved, f"the broker has ended by itself\n{self._broker.log_text()[-4000:]}"
            await self._revive()
        (name,) = self._chance.choices(list(self._deeds), self._weights)
        begun = time.monotonic_ns()
        await self._deeds[name]()
        await self._revive()
        self._history.events.append(Fault(name, begun, time.monotonic_ns()))

    async def _revive(self) -> None:
        for _ in range(STARTS_MAX):
            if not self._broker.stopped:
                return
            self._note("start")
            self._starved = False
            if await asyncio.to_thread(self._start):
                return
        raise AssertionError(f"no start in {STARTS_MAX} attempts\n{self._broker.log_text()[-4000:]}")

    def _start(self) -> bool:
        try:
            self._broker.start()
        except AssertionError:
            return False
        return True

    def _note(self, what: str) -> None:
        now = time.monotonic_ns()
        self._history.events.append(Fault(what, now, now))

    async def _kill(self) -> None:
        self._note("kill -9")
        await asyncio.to_thread(self._broker.kill)

    async def _kill_in_a_start(self) -> None:
        await self._kill()
        starting = asyncio.create_task(asyncio.to_thread(self._start))
        await asyncio.sleep(self._chance.uniform(0.05, 1.0))
        self._note("kill -9")
        os.kill(self._broker.pid, signal.SIGKILL)
        await starting
        await asyncio.to_thread(self._broker.kill)  # in a thread: a process with much memory takes a while to exit

    async def _kill_a_client(self) -> None:
        self._chance.choice(self._clients).kill()

    async def _jump(self) -> None:
        assert self._clock is not None, "otherwise its weight is 0"
        self._clock.set(self._chance.choice(JUMPS))
        await asyncio.sleep(JUMPED_S)

    async def _pause(self) -> None:
        os.kill(self._broker.pid, signal.SIGSTOP)
        await asyncio.sleep(self._chance.uniform(*PAUSES_S))
        if self._chance.randrange(3):
            os.kill(self._broker.pid, signal.SIGCONT)
        else:
            await self._kill()

    async def _no_memory(self) -> None:
        await self._limited(resource.RLIMIT_AS, _mapped_bytes(self._broker.pid) + MEMORY_LEFT_BYTES)

    async def _no_longer_files(self) -> None:
        await self._limited(resource.RLIMIT_FSIZE, LEFT_BYTES)

    async def _limited(self, which: int, limit: int) -> None:
        pid = self._broker.pid
        self._starved = True
        before = resource.prlimit(pid, which)
        resource.prlimit(pid, which, (limit, before[1]))
        await asyncio.sleep(PAUSE_S)
        if not self._broker.stopped:
            resource.prlimit(pid, which, before)

    async def _full_disk(self) -> None:
        await self._filled(self._chance.randrange(8 << 20, 250 << 20))

    async def _no_disk(self) -> None:
        await self._filled(0)

    async def _filled(self, left_bytes: int) -> None:
        """Reduce the space for a while, in which the broker may be killed; it restarts with the space restored."""
        self._starved = True
        await asyncio.to_thread(self._disk.fill, left_bytes)
        try:
            await asyncio.sleep(PAUSE_S)
            if not self._chance.randrange(2):
                await self._kill()
        finally:
            self._disk.empty()


def _mapped_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (size,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize:"))
    return size
