"""The sim engine says what its KV cache holds, so that an index that only listens is right."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.clock import run_virtual
from dynamo_local.core.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.core.routing.kv_index import KvIndex
from dynamo_local.engines.sim.blocks import BlockPool
from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.transfers import InMemoryTransport
from dynamo_local.kv_hashes import block_hashes
from dynamo_local.ports import EngineRequest, SamplingParams
from dynamo_local.profile.interpolation import FixedModel
from tests.tools.examples import examples


class Listener:
    """A `KvEventPublisher` that keeps all, and an index of it."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self.index = KvIndex()

    def publish(self, events: Sequence[KvEvent]) -> None:
        self.events += events
        for event in events:
            self.index.apply(1, event)


def engine(listener: Listener, blocks: int = 64) -> SimEngine:
    options = SimOptions(block_size=4, num_gpu_blocks=blocks)
    model = FixedModel(prefill_ms_per_token=1, decode_ms=1)
    return SimEngine(options, transport=InMemoryTransport(), perf_model=model, kv_events=listener)


async def answer(subject: SimEngine, name: str, prompt: Sequence[int], tokens: int = 1) -> list[int]:
    """The output of one request."""
    request = EngineRequest(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    return [token async for output in subject.generate(request) for token in output.token_ids]


def test_a_prompts_full_blocks_are_stored_in_a_chain_and_an_outputs_behind_them() -> None:

    async def main() -> None:
        listener = Listener()
        subject = engine(listener)
        await subject.start()
        prompt = list(range(10))
        output = await answer(subject, "a", prompt, 8)
        hashes = block_hashes([*prompt, *output[:-1]], 4)  # the last token's KV is never computed
        assert listener.events[0] == BlocksStored(tuple(hashes[:2]))
        assert listener.events[1] == BlocksStored(tuple(hashes[2:]), parent=hashes[1])
        assert listener.index.find_matches(block_hashes([*prompt, *output], 4)) == {1: 4}
        assert subject.reset_prefix_cache()
        assert listener.events[2:] == [AllBlocksCleared()]
        await answer(subject, "b", prompt)
        await subject.close()
        assert listener.events[-1] == AllBlocksCleared()

    run_virtual(main())


def test_what_is_evicted_is_said_to_be_removed_and_a_busy_cache_is_not_reset() -> None:

    async def main() -> None:
        listener = Listener()
        subject = engine(listener, blocks=4)
        await subject.start()
        one, two = list(range(12)), list(range(100, 108))
        await answer(subject, "a", one)
        await answer(subject, "b", two)
        first = block_hashes(one, 4)
        assert BlocksRemoved((first[2],)) in listener.events
        assert listener.index.find_matches(first) == {1: 2}
        running = asyncio.create_task(answer(subject, "c", two, 5))
        await asyncio.sleep(0.006)
        assert not subject.reset_prefix_cache()
        await running
        await subject.close()

    run_virtual(main())


@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=12),
    apart_ms=st.integers(0, 40),
)
@settings(max_examples=examples(60))
def test_an_index_that_listens_matches_what_the_engine_matches(
    prompts: list[tuple[int, int, int]], apart_ms: int
) -> None:

    async def main() -> None:
        listener = Listener()
        subject = engine(listener, blocks=12)
        await subject.start()
        tokens = [[family, *range(length)] for family, length, _ in prompts]
        async with asyncio.TaskGroup() as group:
            for n, (_, _, count) in enumerate(prompts):
                group.create_task(answer(subject, str(n), tokens[n], count))
                await asyncio.sleep(apart_ms / 1000)
        for prompt in tokens:
            known = listener.index.find_matches(block_hashes(prompt, 4)).get(1, 0)
            assert known * 4 / len(prompt) == subject.prefix_hit_rate(prompt)
        await subject.close()

    run_virtual(main())


def test_blocks_that_others_hold_already_are_not_said_again() -> None:
    journal: list[KvEvent] = []
    pool = BlockPool(8, journal)
    pool.store(pool.take(1), [2])
    journal.clear()

    pool.store(pool.take(3), [1, 2, 3])

    assert journal == [BlocksStored((1,)), BlocksStored((3,), parent=2)]
