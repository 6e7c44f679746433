"""A headless Chromium that the dashboard tests control by WebDriver (W3C) over HTTP.

Needs Debian's ``chromium`` and ``chromium-driver``; ``missing`` returns the absent package. The browser records its
requests and console messages, so that tests can assert what the page must not do.
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
_ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's key of an element reference.


def missing() -> str | None:
    """Return the reason to skip a test if a program is not installed."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            return f"{program} is not installed; on Debian: apt-get install {package}"
    return None


class Browser:
    """One browser window with an empty profile in ``directory``."""

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
        # Ignore the requests of the browser's start page.
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

        chromedriver chooses a free IPv6 port and then needs the same IPv4 port. If the IPv4 port is in use, this
        function starts chromedriver again.
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
        """Set the size of the page in CSS pixels."""
        await self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def colours(self, scheme: str) -> None:
        """Set the preferred colour scheme, ``light`` or ``dark``."""
        await self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page (``arguments``, ``return``) and return its result."""
        return await self._command("execute/sync", {"script": script, "args": list(arguments)})

    async def until(self, script: str, *arguments: object, timeout_s: float = 60.0) -> Any:
        """Evaluate an expression until its value is truthy; return the value."""
        found: Any = None

        async def holds() -> bool:
            nonlocal found
            found = await self.run(f"return {script}", *arguments)
            return bool(found)

        await until(holds, script, timeout_s=timeout_s)
        return found

    async def text(self, selector: str) -> str:
        """Return the text of the first element that matches a CSS selector."""
        return str(await self.run("return document.querySelector(arguments[0]).textContent", selector))

    async def press(self, *keys: str) -> None:
        """Press keys one after the other (keys without a character: WebDriver's code points)."""
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
        """Return a PNG of the whole page, also outside the window."""
        shot = await self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    async def complaints(self) -> list[str]:
        """Return the console's messages: errors, warnings and violations of the Content-Security-Policy."""
        return [entry["message"] for entry in await self._command("se/log", {"type": "browser"})]

    async def requested(self) -> Sequence[str]:
        """Return the URLs of all requests so far, pages included."""
        for entry in await self._command("se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._requested.append(message["params"]["request"]["url"])
        return self._requested

    async def cdp(self, command: str, **parameters: object) -> Any:
        """Run a command of the Chrome DevTools Protocol."""
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
