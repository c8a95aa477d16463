"""A headless Chromium driven over two pipes by its debugging protocol: opens pages, presses keys and reads them.

There is one page in one browser, with a temporary profile.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
WAIT_SECONDS_MAX: Final = 60.0  # for a busy machine


def find_browser() -> str | None:
    """Return the path of a browser: POLYWIRE_BROWSER, or one on the path."""
    return os.environ.get("POLYWIRE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """The one page of a browser."""

    def __init__(self, asking: int, answering: int) -> None:
        self._asking = asking
        self._answering = answering
        self._ids = count(1)
        self._session = ""
        self._rest = b""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the browser."""
        number = next(self._ids)
        asked: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._asking, json.dumps(asked).encode() + b"\0")
        while True:
            reported = self._read()
            if reported.get("id") == number:
                assert "error" not in reported, reported
                return reported["result"]
            self._note(reported)

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            more = os.read(self._answering, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, reported: Any) -> None:
        if reported["method"] == "Runtime.exceptionThrown" or (
            reported["method"] == "Log.entryAdded" and reported["params"]["entry"]["level"] == "error"
        ):
            self.errors.append(json.dumps(reported["params"]))

    def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """Set the window's size and color scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def log_in(self, name: str, password: str) -> None:
        """Send this user's credentials from now on."""
        login = base64.b64encode(f"{name}:{password}".encode()).decode()
        self.call("Network.enable")
        self.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {login}"})

    def open(self, url: str) -> None:
        """Open a URL."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self) -> str:
        """Return the text of the main part."""
        return str(self.evaluate("(document.querySelector('main') || document.body)?.innerText ?? ''"))

    def text_of(self, selector: str) -> str:
        """Return the text of the first element that matches, or an empty string if there is none yet."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def until(self, seen: Callable[[str], bool] | str) -> str:
        """Return the text once it contains the expected words."""
        end = time.monotonic() + WAIT_SECONDS_MAX
        while True:
            text = self.text()
            if seen in text if isinstance(seen, str) else seen(text):
                return text
            assert time.monotonic() < end, text
            time.sleep(0.05)

    def press(self, *keys: str) -> None:
        """Press keys one after another."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def fill(self, label: str, text: str) -> None:
        """Type into the field with this label, once it is there."""
        fields = "[...document.querySelectorAll('main label')]"
        found = f"{fields}.find((field) => field.innerText.trim() == {json.dumps(label)})"
        self._exists(found)
        self.evaluate(f"{found}.querySelector('input, textarea').value = {json.dumps(text)}")

    def click(self, label: str) -> None:
        """Press the button, or follow the link, with this text, once it is there."""
        buttons = "[...document.querySelectorAll('main button, main a, main summary')]"
        found = f"{buttons}.find((button) => button.innerText == {json.dumps(label)})"
        self._exists(found)
        self.evaluate(f"{found}.click()")

    def _exists(self, expression: str) -> None:
        end = time.monotonic() + WAIT_SECONDS_MAX
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression}: {self.text()}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until the page has been laid out and painted again."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => null)"
        )

    def screenshot(self, path: Path) -> None:
        """Save a screenshot."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Page]:
    """Start a browser with one page."""
    read_asked, asking = os.pipe()
    answering, write_answer = os.pipe()
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    ]
    script = f'exec 3<&{read_asked} 4>&{write_answer}; exec "$@"'
    command = [
        "bash",
        "-c",
        script,
        "bash",
        program,
        *words,
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    process = subprocess.Popen(
        command, pass_fds=(read_asked, write_answer), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read_asked)
    os.close(write_answer)
    try:
        yield Page(asking, answering)
    finally:
        os.close(asking)
        os.close(answering)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def checked_page(profile: Path) -> Iterator[Page]:
    """Start a browser with one wide page, which must report no error until the end."""
    program = find_browser()
    assert program is not None
    with browser(program, profile) as page:
        page.look(width=1200, height=800)
        yield page
        assert page.errors == []
