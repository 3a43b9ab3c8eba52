"""The index against the plainest model there is: a set of blocks per worker, and a walk along the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.core.routing.kv_index import EventBatch, KvIndex, KvTracker, Snapshot
from dynamo_local.kv_hashes import block_hashes
from tests.tools.examples import examples

PROMPTS = [
    *(block_hashes([family, *range(39)], 1) for family in range(2)),
    block_hashes([1, *range(20), *range(100, 119)], 1),
]
"""Prompts of 40 blocks. The last two have 21 in common; a question may leave a prompt's path anywhere."""

WORKERS = st.integers(1, 5)


@st.composite
def stored(draw: st.DrawFn) -> BlocksStored:
    """Blocks that follow each other, from anywhere in a prompt; what is before them need not be known."""
    prompt = draw(st.sampled_from(PROMPTS))
    begin = draw(st.integers(0, len(prompt) - 1))
    blocks = tuple(prompt[begin : draw(st.integers(begin + 1, len(prompt)))])
    return BlocksStored(blocks, prompt[begin - 1] if begin and draw(st.booleans()) else None)


EVENTS = st.one_of(
    stored(),
    st.lists(st.sampled_from([block for prompt in PROMPTS for block in prompt]), max_size=6).map(
        lambda blocks: BlocksRemoved(tuple(blocks))
    ),
    st.just(AllBlocksCleared()),
)
STEPS = st.lists(st.tuples(WORKERS, st.one_of(EVENTS, st.none())), max_size=60)
QUESTIONS = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 40), st.integers(0, 3)).map(
    lambda asked: [*asked[0][: asked[1]], *[2**63 + n for n in range(asked[2])]]
)


def told(held: dict[int, set[int]], worker: int, event: KvEvent | None) -> None:
    if event is None:
        held.pop(worker, None)
    elif isinstance(event, BlocksStored):
        held.setdefault(worker, set()).update(event.block_hashes)
    elif isinstance(event, BlocksRemoved):
        held.setdefault(worker, set()).difference_update(event.block_hashes)
    else:
        held[worker] = set()


def walked(held: dict[int, set[int]], prompt: list[int]) -> dict[int, int]:
    scores = {}
    for worker, blocks in held.items():
        count = next((n for n, block in enumerate(prompt) if block not in blocks), len(prompt))
        if count:
            scores[worker] = count
    return scores


@given(steps=STEPS, questions=st.lists(QUESTIONS, min_size=1, max_size=5))
@settings(max_examples=examples(300))
def test_the_index_answers_as_the_model(steps: list[tuple[int, KvEvent | None]], questions: list[list[int]]) -> None:
    index, held = KvIndex(), dict[int, set[int]]()
    for worker, event in steps:
        told(held, worker, event)
        if event is None:
            index.worker_gone(worker)
        else:
            index.apply(worker, event)
            if len(steps) % 2:
                index.apply(worker, event)  # a repetition changes nothing
    for prompt in questions:
        assert index.find_matches(prompt) == walked(held, prompt)
    for worker in range(1, 6):
        assert index.blocks(worker) == held.get(worker, set())
    assert len(index) == len(set().union(*held.values()))


@given(steps=STEPS, truth=st.sets(st.sampled_from([block for prompt in PROMPTS for block in prompt])))
def test_replacing_a_view_is_as_if_it_had_been_told_so(
    steps: list[tuple[int, KvEvent | None]], truth: set[int]
) -> None:
    index, held = KvIndex(), dict[int, set[int]]()
    for worker, event in steps:
        told(held, worker, event)
        index.worker_gone(worker) if event is None else index.apply(worker, event)

    index.replace(2, [[block] for block in truth])

    held[2] = truth
    assert all(index.find_matches(prompt) == walked(held, prompt) for prompt in PROMPTS)


def test_a_long_prompt_is_matched_past_every_look() -> None:
    prompt = block_hashes(range(3000), 1)
    index = KvIndex()
    lengths = {1: 3000, 2: 2999, 3: 528, 4: 529, 5: 527, 6: 16, 7: 17, 8: 15, 9: 1, 10: 1040, 11: 1041}
    for worker, length in lengths.items():
        index.stored(worker, prompt[:length])

    assert index.find_matches(prompt) == lengths


class Publisher:
    """A worker's side: numbers its batches, and can answer."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.batches: list[EventBatch] = []
        self.held: set[int] = set()

    def say(self, event: KvEvent) -> EventBatch:
        model = {0: self.held}
        told(model, 0, event)
        self.held = model[0]
        self.batches.append(EventBatch(self.epoch, len(self.batches) + 1, (event,)))
        return self.batches[-1]


@given(data=st.data())
@settings(max_examples=examples(200))
def test_batches_that_are_lost_repeated_or_out_of_order_are_made_good(data: st.DataObject) -> None:
    """Whatever NATS does to the batches, and when the worker is asked: after its answer the view is right."""
    tracker, publisher = KvTracker(KvIndex()), Publisher("a")
    tracker.joined(7)
    on_their_way: list[EventBatch] = []
    for _ in range(data.draw(st.integers(0, 25))):
        match data.draw(st.sampled_from(["say", "say", "say", "arrive", "lose", "repeat", "sync", "restart"])):
            case "say":
                on_their_way.append(publisher.say(data.draw(EVENTS)))
            case "arrive" if on_their_way:
                tracker.receive(7, on_their_way.pop(data.draw(st.integers(0, len(on_their_way) - 1))))
            case "lose" if on_their_way:
                on_their_way.pop()
            case "repeat" if publisher.batches:
                tracker.receive(7, data.draw(st.sampled_from(publisher.batches)))
            case "sync":
                answer(tracker, publisher, replay=data.draw(st.booleans()))
            case "restart":
                publisher, on_their_way = Publisher(publisher.epoch + "a"), []
    for batch in on_their_way:
        tracker.receive(7, batch)
    tracker.receive(7, EventBatch(publisher.epoch, len(publisher.batches)))  # the sign of life
    for _ in range(2):
        if tracker.needs_sync(7):
            answer(tracker, publisher, replay=data.draw(st.booleans()))

    assert not tracker.needs_sync(7)
    assert tracker.index.blocks(7) == publisher.held


def answer(tracker: KvTracker, publisher: Publisher, *, replay: bool) -> None:
    """What a worker says when asked: batches where it can, else all."""
    epoch, seq = tracker.position(7)
    if replay and epoch == publisher.epoch:
        tracker.replayed(7, publisher.batches[seq:])
    else:
        tracker.rebuilt(7, Snapshot(publisher.epoch, len(publisher.batches), [[block] for block in publisher.held]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_golden_case_in_any_order(order: tuple[int, ...]) -> None:
    prompt = block_hashes([432, 265, 251, 234, 673, 654], 2)
    holders = [(1, 2, 3), (1, 2), (1,)]
    index = KvIndex()
    for n in order:
        for worker in holders[n]:
            index.stored(worker, (prompt[n],))

    assert index.find_matches(prompt) == {1: 3, 2: 2, 3: 1}
