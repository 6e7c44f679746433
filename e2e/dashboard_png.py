"""Creates docs/dashboard.png: the dashboard of a router under load, with seven fast instances and one slow instance.

Run as ``.venv/bin/python e2e/dashboard_png.py [FILE]``; needs chromium and chromium-driver.
"""

import asyncio
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from dualmap.pools.pool import Member, MemberState, Model, Pool, Slo
from harness.browser import Browser, missing
from harness.fleet import Fleet

INSTANCES = 8
SLOW = 2
LOAD_S = 90.0
PER_SECOND = 12.0


def pools() -> list[Pool]:
    """Return a pool with a joining instance, and a second, healthy pool."""
    members = [Member(id=f"qwen-{number}", address=f"10.0.0.{number}", port=8000) for number in range(INSTANCES)]
    members[-1] = replace(members[-1], state=MemberState.JOINING, weight=40)
    qwen = Pool(
        namespace="llm",
        name="qwen",
        model=Model(name="qwen"),
        slo=Slo(ttft_s=2.0),
        members=tuple(members),
        ring_version=9,
    )
    small = tuple(Member(id=f"small-{number}", address=f"10.0.1.{number}", port=8000) for number in range(4))
    return [qwen, Pool(namespace="llm", name="small", model=Model(name="small"), members=small, ring_version=2)]


async def main(file: Path) -> None:
    """Send load to the router and write a picture of its dashboard."""
    fleet = Fleet(pools())
    fleet.speeds[fleet.pools[0].members[SLOW].endpoint] = 900.0
    with TemporaryDirectory(prefix="dualmap-") as directory:
        async with fleet.served() as url, Browser(Path(directory)) as browser:
            load = asyncio.create_task(fleet.load(per_second=PER_SECOND))
            await asyncio.sleep(LOAD_S)
            await browser.resize(1360, 900)
            await browser.open(url)
            await browser.until("document.querySelectorAll('#decisions li').length > 5")
            picture = await browser.screenshot()
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load
    await asyncio.to_thread(file.write_bytes, picture)


if __name__ == "__main__":
    if (why := missing()) is not None:
        sys.exit(why)
    default = Path(__file__).parents[1] / "docs" / "dashboard.png"
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else default))
