"""Tests of the dashboard in a headless Chromium, with a demo under load and with a router of a hundred instances."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest
import pytest_asyncio

import builders
from dualmap.engines.profile import EngineProfile
from dualmap.engines.source import SourceState, SourceStatus
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import Engine, KvEvents, MemberState, Model, Pool, Slo, Tokenizer, TokenSource
from harness.browser import Browser, missing
from harness.fleet import Fleet
from harness.processes import Child, dualmap_argv
from harness.stack import write_pool
from ports import reserved_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]
needs_browser = pytest.mark.skipif(missing() is not None, reason=str(missing()))

# The limit is long, because the demo starts seven processes one after the other and other work may use most of the CPU
# time.
DEMO_STARTS_S = 150.0
TAB, ENTER, SPACE = "\ue004", "\ue007", " "
HOSTILE = "<img src=x onerror=document.title='owned'>"
POOL = {
    "apiVersion": "serving.dualmap.dev/v1alpha1",
    "kind": "InferencePool",
    "metadata": {"name": "qwen", "namespace": "llm"},
    "spec": {"model": {"name": "m"}},
    "status": {"ring": {"version": 1, "members": [{"id": "m-0", "address": "10.0.0.1", "port": 8000}]}},
}
# WCAG 2.2, 1.4.3: the contrast of each visible text with the nearest opaque background.
CONTRASTS = """
const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const [r, g, b, a = 1] = parse(getComputedStyle(at).backgroundColor);
    if (a > 0.99) return [r, g, b];
  }
  return [255, 255, 255];
};
const poor = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  const seen = node.checkVisibility() && !node.closest(".hidden, noscript, .skip, title");
  if (!walker.currentNode.data.trim() || !seen) continue;
  const style = getComputedStyle(node);
  const colour = parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
  const [a, b] = [luminance(colour), luminance(behind(node))].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize), bold = parseInt(style.fontWeight) >= 700;
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < (size >= 24 || (bold && size >= 18.66) ? 3 : 4.5)) poor.push([walker.currentNode.data, ratio]);
}
return poor;
"""
# Returns the text of the decision list after a restarted router reuses a decision's number.
AGAIN = """
const { Decisions } = await import("./dashboard/decisions.js");
const [list, rules, pause, note] = ["ol", "ul", "button", "span"].map((tag) => document.createElement(tag));
const shown = new Decisions({ list, rules, pause, note }, () => {});
const decision = { number: 3, at: 1700000000, refused: "queue_full", reason: "Too many wait" };
const says = (...decisions) => (shown.show({ rules: {}, decisions }, null), list.textContent);
const before = says(decision);
const node = list.firstChild;
return [before, says({ ...decision, at: 1700000000.1, reason: "a jitter of the clock" }),
  says({ ...decision, at: 1700000100, refused: "no_endpoint" }), list.firstChild === node];
"""
# Counts the announcements to screen readers, and the changes of the verdict's level.
COUNT_ANNOUNCEMENTS = """
const verdict = document.getElementById("verdict");
let level = verdict.dataset.level;
window.said = window.changed = 0;
new MutationObserver(() => { window.said += 1; })
  .observe(document.getElementById("announcement"), {childList: true, characterData: true, subtree: true});
new MutationObserver(() => { window.changed += level !== verdict.dataset.level; level = verdict.dataset.level; })
  .observe(verdict, {attributes: true, attributeFilter: ["data-level"]});
"""
SEEN = "[...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"


@asynccontextmanager
async def window() -> AsyncIterator[Browser]:
    with TemporaryDirectory(prefix="dualmap-") as directory:
        async with Browser(Path(directory)) as browser:
            await browser.resize(1360, 900)
            yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="fleet")
async def _fleet() -> AsyncIterator[Fleet]:
    """Yield two pools: a small pool, and a hundred instances under load, with one slow, one joining and one draining
    instance.
    """
    many = builders.pool(100)
    joining = replace(many.members[40], state=MemberState.JOINING, weight=40)
    draining = replace(many.members[99], state=MemberState.DRAINING)
    members = (*many.members[:40], joining, *many.members[41:99], draining)
    tokenizer = Tokenizer(source=TokenSource.RENDERER, url="http://renderer:8000")
    engine = Engine(tokenizer=tokenizer, kv_events=KvEvents(enabled=True))
    few = Pool(
        namespace="llm",
        name="other",
        model=Model(name="o"),
        engine=engine,
        kv_store=KvStore(type=StoreType.MOONCAKE, endpoint="http://mooncake:9003"),
        members=builders.members(2),
    )
    fleet = Fleet([replace(many, model=Model(name=HOSTILE), slo=Slo(ttft_s=2.0), members=members), few])
    fleet.speeds[many.members[3].endpoint] = 500.0
    async with fleet.served():
        load = asyncio.create_task(fleet.load(per_second=60.0))
        yield fleet
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="shared_browser")
async def _shared_browser() -> AsyncIterator[Browser]:
    async with window() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module", name="browser")
async def _browser(shared_browser: Browser, fleet: Fleet) -> Browser:
    """Return a browser with the dashboard of the pool of a hundred instances, with decisions."""
    await shared_browser.resize(1360, 900)
    await shared_browser.colours("light")
    await shared_browser.open("about:blank")
    await shared_browser.open(fleet.url)
    await shared_browser.until("document.querySelectorAll('#decisions li').length > 5")
    return shared_browser


@needs_browser
@pytest.mark.timeout(300)
async def test_dashboard_shows_a_running_demo_and_the_demos_end(tmp_path: Path) -> None:
    argv = dualmap_argv("demo", "--serve", "--engines", "4", "--out", tmp_path / "out")
    async with Child("demo", argv, directory=tmp_path) as demo, window() as browser:
        url = (await demo.wait_for_line(r"dashboard: (\S+)", timeout_s=DEMO_STARTS_S))[1]
        await browser.open(url)
        await browser.until("document.querySelectorAll('#decisions li').length > 5")
        assert await browser.run(f"return {SEEN}", "tbody th") == [f"engine-{number}" for number in range(4)]
        assert await browser.run("return document.querySelectorAll('.ring1 path, .ring2 path').length") == 8
        assert "because" in await browser.text("#decisions li")
        assert "Pair: engine-" in await browser.text("#decisions li")
        # First tokens, the SLO and the share of requests that meet it.
        await browser.until("/(meets|misses) its SLO: [0-9.]+%/.test(document.getElementById('headline').textContent)")
        assert "goal" in await browser.text("#tiles")
        assert await browser.run("return document.querySelector('.plane .p90').getAttribute('d')")
        before = await browser.run(f"return {SEEN}", "tbody td")
        await browser.until(f"JSON.stringify({SEEN}) !== arguments[1]", "tbody td", str(before).replace("'", '"'))
        newest = await browser.text("#decisions li")
        await browser.until("document.querySelector('#decisions li').textContent !== arguments[0]", newest)
        assert await browser.run("return document.getElementById('connection').textContent") == "live"
        assert await browser.complaints() == []
        assert {each for each in await browser.requested() if not each.startswith(url)} == set()

        demo.terminate()
        assert await demo.wait(timeout_s=30) == 0
        await browser.until("/reconnecting/.test(document.getElementById('connection').textContent)")
        assert "lost" in await browser.text("#announcement")
        assert await browser.run("return document.title.startsWith('?')"), "the tab title shows it too"


@needs_browser
async def test_dashboard_shows_a_hundred_instances(browser: Browser) -> None:
    assert await browser.run("return document.querySelectorAll('tbody tr').length") == 100
    assert await browser.run("return document.querySelectorAll('.ring1 path').length") == 99, "one member drains"
    assert "not on the rings: m-99 (Draining)" in await browser.text("#rings-caption")
    assert "m-40 is joining." in await browser.text("#problems")
    await browser.run("document.getElementById('troubled').click()")
    await browser.until("document.querySelectorAll('tbody tr').length < 50")
    assert await browser.complaints() == []


@needs_browser
async def test_dashboard_shows_hostile_names_as_text(browser: Browser) -> None:
    await browser.until("document.getElementById('about').textContent.includes(arguments[0])", HOSTILE)
    assert await browser.run("return document.querySelectorAll('img').length") == 0
    assert "owned" not in await browser.run("return document.title")
    await browser.run("location.hash = `pool=${encodeURIComponent(arguments[0])}`", HOSTILE)
    await browser.until("document.getElementById('headline').textContent.includes(arguments[0])", HOSTILE)
    assert await browser.run("return document.querySelectorAll('img').length") == 0


@needs_browser
async def test_dashboard_is_usable_with_only_the_keyboard(browser: Browser) -> None:
    await browser.press(TAB)
    assert await browser.run("return document.activeElement.textContent") == "Skip to the pool"
    assert await browser.run("return document.activeElement.getBoundingClientRect().top") >= 0, "the link is visible"
    await browser.press(ENTER)
    assert await browser.run("return document.activeElement.id") == "main"
    await browser.press(TAB)
    assert await browser.run("return document.activeElement.id") == "filter"
    assert await browser.run("return getComputedStyle(document.activeElement).outlineWidth") == "3px"
    await browser.press(*"m-42")
    await browser.until("document.querySelectorAll('tbody tr').length === 1")
    assert await browser.text("#shown") == "1 of 100"
    assert await browser.run("return document.querySelectorAll('.ring1 path[data-marked]').length") == 1
    await browser.run("arguments[0].value = ''; arguments[0].dispatchEvent(new Event('input'))", await active(browser))
    # The check box, the scrollable table, its first button.
    await browser.press(TAB, TAB, TAB)
    assert await browser.run("return document.activeElement.textContent") == "Instance"
    await browser.press(ENTER)
    await browser.until("document.querySelector('tbody th').textContent === 'm-99'")
    assert await browser.run("return document.activeElement.parentElement.getAttribute('aria-sort')") == "descending"
    # The focus does not move when the numbers change.
    told = await browser.run("return document.querySelector('#tiles').textContent")
    await browser.until("document.querySelector('#tiles').textContent !== arguments[0]", told)
    assert await browser.run("return document.activeElement.textContent") == "Instance"


@needs_browser
async def test_dashboard_pool_link_selects_pool_even_after_reload(browser: Browser) -> None:
    await browser.press(TAB, TAB, TAB)
    assert "llm/other" in await browser.run("return document.activeElement.textContent")
    await browser.press(ENTER)
    await browser.until("document.querySelectorAll('tbody tr').length === 2")
    assert (await browser.text("#headline")).startswith("llm/other")
    assert await browser.run("return document.querySelector('[aria-current]').textContent.includes('llm/other')")
    await browser.open(await browser.run("return location.href"))
    await browser.until("document.querySelectorAll('tbody tr').length === 2")


@needs_browser
async def test_dashboard_shows_engines_and_their_kv_events(browser: Browser, fleet: Fleet) -> None:
    heads = f"return {SEEN}.filter((text, index) => !document.querySelectorAll('thead th')[index].hidden)"
    assert "KV events" not in await browser.run(heads, "thead th")
    live, lost = SourceStatus(state=SourceState.LIVE), SourceStatus(state=SourceState.FAILED, reason=HOSTILE)
    for member, status in (("m-0", live), ("m-1", lost)):
        fleet.picker.on_kv_events("llm/other", member, 0, (), status)
        fleet.picker.on_profile(0.0, "llm/other", member, EngineProfile(version="0.33.0", reason=status.reason))

    await browser.open(f"{fleet.url}#pool=llm/other")
    await browser.until("document.querySelectorAll('tbody tr').length === 2")
    await browser.until("document.querySelectorAll('td[data-problem]').length === 2")

    heads = await browser.run(heads, "thead th")
    cells = await browser.run(f"return {SEEN}", "tbody td")
    rows = [dict(zip(heads[1:], cells[start:], strict=False)) for start in (0, len(heads) - 1)]
    assert [row["KV events"] for row in rows] == ["Live", "Failed"]
    assert [row["Engine"] for row in rows] == ["0.33.0", "0.33.0"]
    tooltips = "return [...document.querySelectorAll('td[data-problem]')].map((each) => each.title)"
    assert await browser.run(tooltips) == [HOSTILE, HOSTILE]
    assert "The KV events of m-1 are incomplete" in await browser.text("main")
    assert await browser.run("return document.title") != "owned"


@needs_browser
async def test_dashboard_shows_fetched_kv_only_for_a_pool_that_fetches(browser: Browser, fleet: Fleet) -> None:
    assert "Fetched KV" not in await browser.text("#tiles")
    await browser.open(f"{fleet.url}#pool=llm/other")
    await browser.until("document.querySelectorAll('tbody tr').length === 2")
    tiles = await browser.text("#tiles")
    assert "Fetched KV" in tiles
    assert "Session moves" in tiles


@needs_browser
async def test_dashboard_pause_button_stops_the_decision_list(browser: Browser) -> None:
    await browser.run("document.getElementById('pause').focus()")
    await browser.press(SPACE)
    assert await browser.run("return document.activeElement.getAttribute('aria-pressed')") == "true"
    newest = await browser.text("#decisions li")
    told = await browser.text("#tiles")
    await browser.until("document.querySelector('#tiles').textContent !== arguments[0]", told)
    assert await browser.text("#decisions li") == newest
    await browser.press(SPACE)
    await browser.until("document.querySelector('#decisions li').textContent !== arguments[0]", newest)


@needs_browser
async def test_dashboard_focused_decision_pauses_list_and_marks_pair(browser: Browser) -> None:
    await browser.run("document.getElementById('pause').focus()")
    await browser.press(TAB, TAB)
    assert await browser.run("return document.activeElement === document.querySelectorAll('#decisions li')[1]")
    shown = await browser.run(f"return {SEEN}", "#decisions li")
    told = await browser.text("#tiles")
    await browser.until("document.querySelector('#tiles').textContent !== arguments[0]", told)
    assert await browser.run(f"return {SEEN}", "#decisions li") == shown
    assert "paused" in await browser.text("#decisions-note")
    # The rings show the decision's pair; a dot marks the chosen member.
    chosen = await browser.run("return document.activeElement.decision.chosen")
    assert await browser.run("return document.querySelector('.chord .chosen').dataset.key") == f"end-{chosen}"
    await browser.run("document.activeElement.blur()")
    await browser.until("document.querySelector('#decisions li').textContent !== arguments[0]", shown[0])


@needs_browser
async def test_dashboard_decision_with_reused_number_is_replaced(browser: Browser) -> None:
    before, jitter, after, kept = await browser.run(AGAIN)
    assert before == jitter
    assert "queue_full" in before
    assert "no_endpoint" in after
    assert kept


@needs_browser
async def test_dashboard_shows_its_time_zone(browser: Browser) -> None:
    zone = await browser.run("return Intl.DateTimeFormat().resolvedOptions().timeZone")
    await browser.until("document.getElementById('about').textContent.includes(`time zone (${arguments[0]})`)", zone)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_dashboard_text_has_enough_contrast(browser: Browser, scheme: str) -> None:
    await browser.colours(scheme)
    # The filter shows the members with a problem, in warning colours.
    await browser.run("document.getElementById('troubled').click()")
    page = await browser.run("return getComputedStyle(document.body).backgroundColor")
    assert page == {"light": "rgb(243, 245, 248)", "dark": "rgb(14, 19, 24)"}[scheme]
    assert await browser.run(CONTRASTS) == []


@needs_browser
@pytest.mark.parametrize("width", [320, 768])
async def test_dashboard_fits_narrow_screens(browser: Browser, width: int) -> None:
    await browser.resize(width, 800)
    assert await browser.run("return document.documentElement.scrollWidth") <= width


@needs_browser
async def test_dashboard_announces_only_verdict_changes_to_screen_readers(browser: Browser) -> None:
    await browser.run(COUNT_ANNOUNCEMENTS)
    for _ in range(3):
        told = await browser.text("#tiles")
        await browser.until("document.querySelector('#tiles').textContent !== arguments[0]", told)
    said, changed = await browser.run("return [window.said, window.changed]")
    assert said == changed


@needs_browser
async def test_dashboard_reconnects_after_a_router_restart(tmp_path: Path, shared_browser: Browser) -> None:
    write_pool(tmp_path / "pool.yaml", POOL)
    port = str(reserved_port())
    async with router(tmp_path, port=port) as url:
        await shared_browser.open(url)
        await shared_browser.until("document.getElementById('connection').textContent === 'live'")
    await shared_browser.until("document.getElementById('connection').dataset.state === 'lost'")
    async with router(tmp_path, port=port):
        await shared_browser.until("document.getElementById('connection').textContent === 'live'")
        assert "connected to the router again" in await shared_browser.text("#announcement")


async def test_router_with_dashboard_disabled_serves_only_metrics(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool.yaml", POOL)
    async with router(tmp_path, "--no-dashboard") as url, aiohttp.ClientSession() as session:
        for path, status in (("", 404), ("events", 404), ("dashboard/app.js", 404), ("metrics", 200), ("pools", 200)):
            async with session.get(url + path) as response:
                assert response.status == status, path


@asynccontextmanager
async def router(directory: Path, *arguments: str, port: str = "0") -> AsyncIterator[str]:
    """Run a ``dualmap router``; yield the URL of its metrics port."""
    ports = ("--host", "127.0.0.1", "--grpc-port", "0", "--health-port", "0", "--als-port", "0", "--metrics-port", port)
    argv = dualmap_argv("router", "--pool", directory / "pool.yaml", *ports, *arguments)
    child = Child("router", argv, directory=directory)
    after = len(child.output())
    async with child:
        ready = await child.wait_for_line(r"ready .*metrics=(\S+)", after=after)
        yield f"http://{ready[1]}/"


async def active(browser: Browser) -> object:
    return await browser.run("return document.activeElement")
