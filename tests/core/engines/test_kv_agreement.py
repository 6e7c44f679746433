"""A random engine and the residency agree whenever the source is live."""

from dataclasses import dataclass, replace

import msgspec
from hypothesis import event, example, given
from hypothesis import strategies as st

from block_pool import BlockPool, Publisher, Tokens
from dualmap.engines.block_table import COPIES_MAX
from dualmap.engines.events import Batch, read_batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import Residency
from dualmap.engines.source import Apply, Clear, Effect, EventSource, Message, ReplayEnd, SourceState
from dualmap.engines.token_chain import chain_tokens, pack_tokens, token_root

USABLE = 24
SALTS = ("", "tenant")


def prompt(number: int, blocks: int, rest: int, block_tokens: int) -> Tokens:
    """Return a prompt; all prompts share their first two blocks, and prompts of one number share everything."""
    length = blocks * block_tokens + rest
    return tuple(n if n < 2 * block_tokens else 1000 * number + n for n in range(length))


class Scene:
    """An engine, and a router that follows its events over sockets that lose messages."""

    def __init__(self, *, block_tokens: int, as_maps: bool) -> None:
        self.block_tokens = block_tokens
        self.as_maps = as_maps
        self.now = 0.0
        self.lives = 0
        self.publisher = Publisher(kept=6)
        self.held = HeldBlocks()
        self.awaited: dict[int, tuple[int, ...]] = {}
        self.residency = Residency(self.held, model="m", capacity_blocks=USABLE, awaited=self.awaited)
        self.source = EventSource(replays=True, jitter=0.5)
        self.begin_life()

    def begin_life(self) -> None:
        self.lives += 1
        self.capped = False
        self.pool = BlockPool(usable=USABLE, block_tokens=self.block_tokens, seed=self.lives, as_maps=self.as_maps)

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                batch = read_batch(msgspec.msgpack.decode(effect.message.payload))
                assert isinstance(batch, Batch)
                assert not batch.invalid_events
                self.residency.apply(0, batch)
            elif isinstance(effect, Clear):
                self.residency.clear(0)
            else:
                self.residency.forget_copies(0)

    def publish(self, *, lost: bool) -> None:
        message = self.publisher.publish(self.pool)
        if message is not None and not lost:
            self.act(self.source.on_live(self.now, Message(*message)))

    def replay(self, *, dropped: int, ends: bool) -> None:
        """Run one attempt of a wanted replay; ``dropped`` is a bit mask of the lost answers behind the first one."""
        if self.source.replay_wanted_s is None:
            return
        self.now = max(self.now, self.source.replay_wanted_s)
        wanted = self.source.begin_replay(self.now)
        for number, message in enumerate(self.publisher.replay(wanted.start)):
            if not number or not dropped >> number & 1:
                self.act(self.source.on_replayed(self.now, wanted.attempt, Message(*message)))
        if ends:
            self.act(self.source.on_replayed(self.now, wanted.attempt, ReplayEnd.END))
        elif self.source.next_deadline is not None:
            self.now = self.source.next_deadline
            self.act(self.source.on_deadline(self.now))

    def send(self, tokens: Tokens, salt: str) -> None:
        """Await a prompt that is sent to the engine, and no other one."""
        self.awaited.clear()
        self.residency.take_arrived()
        root = token_root(model="m", cache_salt=salt)
        keys = chain_tokens(pack_tokens(tokens), root=root, block_tokens=16).keys
        if keys:
            self.awaited[keys[-1]] = keys

    def held_tokens(self, tokens: Tokens, salt: str) -> int:
        block_tokens = self.residency.block_tokens
        if block_tokens is None:
            return 0
        chain = chain_tokens(
            pack_tokens(tokens), root=token_root(model="m", cache_salt=salt), block_tokens=block_tokens
        )
        return self.residency.matched_tokens(chain)

    def copies(self) -> dict[int, int]:
        """Return the copies of each block that the residency counts."""
        tables = [group.table for group in self.residency._each()]
        counted: dict[int, int] = {}
        for table in tables:
            for segment in table._segments:
                segment.forget_copies(table._forgotten)
                counted |= {segment.hashes[slot]: each & 0x0F for slot, each in enumerate(segment.states) if each}
        return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the engine does, and what becomes of a replay that the source then wants."""

    kind: str
    name: int
    blocks: int
    rest: int
    salt: str
    dropped: int | None
    ends: bool


STEPS = st.builds(
    Step,
    kind=st.sampled_from(("serve",) * 6 + ("twice", "twice", "lose", "report", "clear", "restart", "told", "wait")),
    name=st.integers(1, 6),
    blocks=st.integers(1, 9),
    rest=st.integers(0, 15),
    salt=st.sampled_from(("", "", "", *SALTS)),
    # A bit for each lost answer; None: no replay begins in this step.
    dropped=st.sampled_from((0, 0, 0, 0, None, 0b10, 0b1110, -1)),
    ends=st.sampled_from((True, True, True, False)),
)


def play(scene: Scene, steps: list[Step], late: int) -> None:
    """Run the steps; the router subscribes before step ``late``."""
    for number, step in enumerate(steps):
        if number == late:
            scene.source.start(scene.now)
        match step.kind:
            case "clear":
                scene.pool.clear()
                scene.capped = False
                scene.publish(lost=False)
            case "restart" | "told":
                scene.publisher.restart()
                scene.begin_life()
                if step.kind == "told" and number >= late:
                    scene.act(scene.source.on_restart(scene.now))
                else:
                    scene.pool.serve(prompt(9, 1, 0, scene.block_tokens))
                    scene.publish(lost=False)
            case "wait":
                scene.now += 70.0
            case kind:
                tokens = prompt(step.name, step.blocks, step.rest % scene.block_tokens, scene.block_tokens)
                times = 2 if kind == "twice" else 1
                scene.send(tokens, step.salt)
                scene.pool.serve(*[tokens] * times, salt=step.salt, report=kind == "report" and scene.as_maps)
                scene.publish(lost=kind == "lose")
        scene.capped |= max(scene.pool.copies.values(), default=0) > COPIES_MAX
        if step.dropped is not None:
            scene.replay(dropped=step.dropped, ends=step.ends)
        check_agreement(scene)


def check_agreement(scene: Scene) -> None:
    """Check the residency, if the source is live and has applied every message."""
    assert len(scene.held) <= scene.residency.blocks
    assert sum(scene.copies().values()) <= USABLE
    followed = 0 if scene.source.sequence is None else scene.source.sequence + 1
    if scene.source.state is not SourceState.LIVE or followed != scene.publisher.next_number:
        return
    event("compared")
    counted, actual = scene.copies(), scene.pool.copies
    if scene.as_maps or scene.capped:
        # Copies above the limit are not counted. A repeated store from the start of a prompt may be a report, so its
        # copies are not counted either.
        assert all(counted[block] <= actual.get(block, 0) for block in counted)
        return
    assert counted == actual
    for name in range(1, 7):
        for salt in SALTS:
            tokens = prompt(name, 9, 1, scene.block_tokens)
            assert scene.held_tokens(tokens, salt) == scene.pool.cached_tokens(tokens, salt) // 16 * 16


@given(st.lists(STEPS, min_size=5, max_size=60), st.integers(0, 8))
def test_live_residency_equals_engines_blocks_and_copies(steps: list[Step], late: int) -> None:
    play(Scene(block_tokens=16, as_maps=False), steps, late)


@given(st.lists(STEPS, min_size=5, max_size=60), st.integers(0, 8))
def test_live_residency_of_small_pages_equals_index_blocks(steps: list[Step], late: int) -> None:
    # Engines with small pages merge equal prefixes, so they have no copies. A prompt that ends with a page has one.
    steps = [replace(step, kind=step.kind.replace("twice", "serve"), rest=step.rest % 3 + 1) for step in steps]
    play(Scene(block_tokens=4, as_maps=False), steps, late)


def step(kind: str, name: int, blocks: int, *, rest: int = 0) -> Step:
    return Step(kind=kind, name=name, blocks=blocks, rest=rest, salt="", dropped=0, ends=True)


# The copies of the prompt that is computed twice are not counted, so removals forget a block too early. The report of
# the block and its known parent is no new copy of the parent.
FORGOTTEN_BLOCK_REPORTED = [
    *[step("serve", 1, 1)] * 8,
    step("serve", 2, 8),
    step("twice", 1, 7),
    step("report", 1, 2, rest=1),
]


@given(st.lists(STEPS, min_size=5, max_size=60), st.integers(0, 8))
@example(FORGOTTEN_BLOCK_REPORTED, 0)
def test_live_residency_with_reports_has_no_block_too_many(steps: list[Step], late: int) -> None:
    play(Scene(block_tokens=16, as_maps=True), steps, late)


def test_prompt_with_two_copies_stays_held_when_one_of_them_goes() -> None:
    scene = Scene(block_tokens=16, as_maps=True)
    scene.source.start(scene.now)
    scene.replay(dropped=0, ends=True)
    hot = prompt(1, 5, 0, 16)
    held_again = 0
    for name in range(1, 40):
        # The common prompt is computed twice at first. The others begin with it, and displace its second copy.
        tokens = hot if name == 1 else (*hot, *range(1000 * name, 1000 * name + 33))
        scene.send(tokens, "")
        scene.pool.serve(*[tokens] * (2 if name == 1 else 1))
        scene.publish(lost=False)
        counted, actual = scene.copies(), scene.pool.copies
        assert all(counted[block] <= actual.get(block, 0) for block in counted)
        held_again = scene.residency.counts.held_again
        assert scene.held_tokens((*hot, 7), "") == scene.pool.cached_tokens((*hot, 7), "") == 80, name
    assert held_again == 5
