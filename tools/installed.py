"""``python -I tools/installed.py --compiled``: check that an installed Polywire serves all protocols and its clients
work.

Run it with the interpreter of the environment to check. It needs no other package, refuses a Polywire imported from a
checkout, and exits with 0 only on success.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import polywire
from polywire.build_info import compiled_modules, describe
from polywire.client.connect import SCHEMES
from polywire.client.sync import connect
from polywire.records.columns import Record

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 30.0
TOPIC: Final = "installed"
RECORDS: Final = 1_000
LOCAL: Final = "127.0.0.1:0"


def check_what_is_installed(*, compiled: bool) -> None:
    """Fail if the imported Polywire is not that of this environment, or not of the expected kind."""
    place = Path(polywire.__file__).resolve()
    if not place.is_relative_to(Path(sys.prefix).resolve()):
        sys.exit(f"not the installed package: place={place} environment={sys.prefix}")
    other = [name for name, is_compiled in compiled_modules().items() if is_compiled is not compiled]
    if other:
        sys.exit(f"these modules should be {'compiled' if compiled else 'uncompiled'}, and are not: {', '.join(other)}")


def start(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """Start the installed command with all protocols; return its process and the address of each protocol."""
    ready = folder / "ready.json"
    listeners = [word for scheme in SCHEMES for word in (f"--{scheme}", LOCAL)]
    command = Path(sys.executable).with_name("polywire")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "POLYWIRE_PURE")}
    process = subprocess.Popen(
        [command, "serve", *listeners, "--data-dir", folder / "data", "--ready-file", ready],
        cwd=folder,
        env=environment,
    )
    deadline = time.monotonic() + START_SECONDS_MAX
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"the broker did not start: exit code {process.wait()}")
        time.sleep(0.05)
    addresses = json.loads(ready.read_text("utf-8"))
    return process, {scheme: f"{addresses[scheme]['host']}:{addresses[scheme]['port']}" for scheme in SCHEMES}


def round_trip(addresses: dict[str, str]) -> None:
    """Write over the `polywire` protocol and read the same over every protocol."""
    values = [b"value-%d" % number for number in range(RECORDS)]
    with connect(f"polywire://{addresses['polywire']}") as client:
        client.create_topic(TOPIC, 1)
        client.produce(TOPIC, [Record(value) for value in values])
        delivered = client.consume(TOPIC, group="readers")
        read = [next(delivered).value for _ in values]
        if read != values:
            sys.exit("a group has not read what was written")
    for scheme, address in addresses.items():
        with connect(f"{scheme}://{address}") as client:
            read = [record.value for record in client.fetch(TOPIC, 0, 0, records_max=RECORDS)]
        if not read or read != values[: len(read)]:
            sys.exit(f"what was written is not what is read over {scheme}")


def main() -> None:
    """Run the check and print what was checked."""
    parser = argparse.ArgumentParser(
        description="Try the Polywire that is installed in this interpreter's environment."
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--compiled", action="store_true", help="every module that can be compiled has to be")
    kind.add_argument("--pure", action="store_true", help="none may be")
    check_what_is_installed(compiled=parser.parse_args().compiled)
    with tempfile.TemporaryDirectory(prefix="polywire-") as folder:
        process, addresses = start(Path(folder))
        try:
            round_trip(addresses)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOP_SECONDS_MAX)
    if code != 0:
        sys.exit(f"the broker did not stop cleanly: exit code {code}")
    print(f"wrote and read over {', '.join(SCHEMES)}: {describe()}")


if __name__ == "__main__":
    main()
