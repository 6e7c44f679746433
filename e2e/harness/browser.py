"""A headless Chromium by WebDriver (W3C), spoken over HTTP: what the dashboard's tests look through.

Debian's ``chromium`` and ``chromium-driver``; ``missing`` says which is not there. Everything that the browser asked
for and everything it complained of is kept, since what it must not do is as much looked at as what it shows.
"""

import asyncio
import base64
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from harness.processes import Child
from harness.waiting import until

_FLAGS: Final = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--force-color-profile=srgb",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--hide-scrollbars",
)
_STARTS: Final = 5
_NO_PORT: Final = "IPv4 port not available"
_ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"  # By which WebDriver names a reference to an element.


def missing() -> str | None:
    """Return what is not installed, in words for a skipped test."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            return f"{program} is not installed; on Debian: apt-get install {package}"
    return None


class Browser:
    """One window. The profile is new and empty, in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._driver = Child("chromedriver", [shutil.which("chromedriver") or "", "--port=0"], directory=directory)
        self._http = aiohttp.ClientSession()
        self._session = ""
        self._requested: list[str] = []

    async def __aenter__(self) -> Self:
        driver = f"http://127.0.0.1:{await self._start_driver()}"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*_FLAGS, f"--user-data-dir={self._directory / 'profile'}"],
        }
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        async with self._http.post(f"{driver}/session", json={"capabilities": {"alwaysMatch": always}}) as response:
            answer = (await response.json())["value"]
            assert response.status == 200, answer
        self._session = f"{driver}/session/{answer['sessionId']}"
        # What the browser's own first page asks for is none of ours.
        await self.open("about:blank")
        await self.requested()
        self._requested.clear()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session:
            await self._http.delete(self._session)
        await self._http.close()
        self._driver.terminate()
        await self._driver.stop()

    async def _start_driver(self) -> int:
        """Start chromedriver and return its port.

        It takes a free port of IPv6 and then wants the same of IPv4, which somebody may have: then it is started anew.
        """
        for _ in range(_STARTS):
            before = len(self._driver.output())
            await self._driver.start()
            line = await self._driver.wait_for_line(rf"started successfully on port (\d+)|{_NO_PORT}", after=before)
            if line[1] is not None:
                return int(line[1])
            await self._driver.stop()
        raise AssertionError(f"chromedriver found no port in {_STARTS} starts:\n{self._driver.output()}")

    async def open(self, url: str) -> None:
        """Load a page and wait for its load event."""
        await self._command("url", {"url": url})

    async def resize(self, width: int, height: int) -> None:
        """Have the page so many CSS pixels to itself."""
        await self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def colours(self, scheme: str) -> None:
        """Have the page told that its reader prefers ``light`` or ``dark``."""
        await self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page (``arguments``, ``return``) and return what it returns."""
        return await self._command("execute/sync", {"script": script, "args": list(arguments)})

    async def until(self, script: str, *arguments: object, timeout_s: float = 60.0) -> Any:
        """Run an expression again and again until it is truthy; return it."""
        found: Any = None

        async def holds() -> bool:
            nonlocal found
            found = await self.run(f"return {script}", *arguments)
            return bool(found)

        await until(holds, script, timeout_s=timeout_s)
        return found

    async def text(self, selector: str) -> str:
        """Return the text of the first element that a CSS selector finds."""
        return str(await self.run("return document.querySelector(arguments[0]).textContent", selector))

    async def press(self, *keys: str) -> None:
        """Press keys one after another (WebDriver's code points for those without a character)."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        await self._command("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    async def point_at(self, selector: str) -> None:
        """Move the pointer to the middle of an element."""
        element = await self.run(
            "const it = document.querySelector(arguments[0]); it.scrollIntoView({block: 'center'}); return it", selector
        )
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {_ELEMENT: element[_ELEMENT]}}
        await self._command("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    async def screenshot(self) -> bytes:
        """Return what the page looks like, all of it and not only what is in the window, as a PNG."""
        shot = await self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    async def complaints(self) -> list[str]:
        """Return what the console says: errors, warnings and violations of the Content-Security-Policy."""
        return [entry["message"] for entry in await self._command("se/log", {"type": "browser"})]

    async def requested(self) -> Sequence[str]:
        """Return the URLs of everything asked for so far, pages included."""
        for entry in await self._command("se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._requested.append(message["params"]["request"]["url"])
        return self._requested

    async def cdp(self, command: str, **parameters: object) -> Any:
        """Give a command of Chrome's own protocol."""
        return await self._command("goog/cdp/execute", {"cmd": command, "params": parameters})

    async def _command(self, name: str, body: dict[str, object]) -> Any:
        async with asyncio.timeout(60), self._http.post(f"{self._session}/{name}", json=body) as response:
            answer = (await response.json())["value"]
            assert response.status == 200, f"{name}: {answer}"
            return answer


def origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    found = re.match(r"\w+:(//[^/]*)?", url)
    assert found is not None, url
    return found[0]
