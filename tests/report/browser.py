"""A real headless Chromium, driven through chromedriver's own protocol: no library, nothing from the network."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no Chromium with chromedriver here (apt-get install chromium chromium-driver)"


class Page:
    """A page in the browser: run JavaScript in it, move the pointer, read what it logged."""

    def __init__(self, session: str) -> None:
        self._session = session

    def _post(self, path: str, body: Any) -> Any:
        return _call(f"{self._session}/{path}", body)

    def open(self, file: Path) -> Self:
        self._post("url", {"url": file.as_uri()})
        return self

    def run(self, script: str, *args: Any) -> Any:
        """The value that the body of a JavaScript function returns."""
        return self._post("execute/sync", {"script": script, "args": list(args)})

    def wait(self, script: str, seconds: float = 30) -> None:
        """Wait until the body of a JavaScript function returns something true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean((() => {{ {script} }})())"):
            assert time.monotonic() < deadline, f"never true: {script}; the console says {self.log('browser')}"
            time.sleep(0.02)

    def emulate(self, width: int, *, dark: bool = False, media: str = "", height: int = 1300) -> None:
        """Make the window that wide, in CSS pixels, for people who prefer dark or light; `media` may be "print"."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        self.command("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})

    def command(self, name: str, params: dict[str, Any]) -> Any:
        """Give a command of the DevTools protocol."""
        return self._post("goog/cdp/execute", {"cmd": name, "params": params})

    def press(self, key: str) -> None:
        """Press and release a key on whatever has the focus."""
        steps = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._post("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": steps}]})

    def point(self, x: float, y: float, *, press: bool = False) -> None:
        """Move the pointer to a place in the window, and click there."""
        steps: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        if press:
            steps += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._post("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": steps}]})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Entries of the log "browser" (console) or "performance" (DevTools events) since the last call."""
        entries: list[dict[str, Any]] = self._post("se/log", {"type": kind})
        return entries


def open_html(page: Page, folder: Path, html: str) -> Page:
    """Write a page into a folder, open it, and wait until it is drawn and its list is filled."""
    (folder / "page.html").write_text(html, encoding="utf-8")
    page.open(folder / "page.html")
    page.wait("return Boolean(window.memplan)")
    page.run("return new Promise(done => setTimeout(() => requestAnimationFrame(() => setTimeout(done))))")
    return page


def _call(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(error.read().decode()) from None


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with a window of 1400 x 1300, for as long as the block lasts."""
    assert DRIVER is not None
    assert CHROMIUM is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = f"http://127.0.0.1:{_port(driver)}"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1300"]
        wanted = {
            "goog:chromeOptions": {"binary": CHROMIUM, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        opened = _call(f"{url}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{url}/session/{opened['sessionId']}"
        try:
            yield Page(session)
        finally:
            request = urllib.request.Request(session, method="DELETE")
            with urllib.request.urlopen(request, timeout=30):
                pass
    finally:
        driver.terminate()
        driver.wait(10)
        if driver.stdout is not None:
            driver.stdout.close()


def _port(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout is not None
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        line = driver.stdout.readline()
        if "started successfully on port " in line:
            return int(line.rpartition(" ")[2].strip().rstrip("."))
    raise AssertionError("chromedriver did not start")
