"""Seeds, scripts and logprobs of the simulated engine."""

from __future__ import annotations

import math

from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.tokens import expected_output
from dynamo_local.ports import EngineOutput, EngineRequest, SamplingExtras, SamplingParams

PROMPT = list(range(300, 340))
OPTIONS = SimOptions(speed=1000.0, num_gpu_blocks=512, block_size=16)


async def outputs(sampling: SamplingParams, prompt: list[int] = PROMPT) -> list[EngineOutput]:
    """All of one request's, from an engine of its own."""
    engine = SimEngine(OPTIONS)
    await engine.start()
    try:
        return [output async for output in engine.generate(EngineRequest("r", prompt, sampling))]
    finally:
        await engine.close()


def tokens(found: list[EngineOutput]) -> list[int]:
    return [token for output in found for token in output.token_ids]


async def test_a_script_is_answered_and_ends_by_itself():
    """Token for token, whatever the natural length would be; `max_tokens` cuts it."""
    script = tuple(range(500, 600))
    whole = await outputs(SamplingParams(200, extras=SamplingExtras(script=script)))
    assert (tokens(whole), whole[-1].finish_reason) == (list(script), "stop")
    cut = await outputs(SamplingParams(30, extras=SamplingExtras(script=script)))
    assert (tokens(cut), cut[-1].finish_reason) == (list(script[:30]), "length")


async def test_a_script_that_is_prefilled_for_another_engine_is_held():
    """One token, by length, as vLLM's prefill engines."""
    engine = SimEngine(OPTIONS)
    await engine.start()
    sampling = SamplingParams(1, extras=SamplingExtras(script=(500, 501)))
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    found = [output async for output in engine.generate(EngineRequest("r", PROMPT, sampling, ask))]
    await engine.close()
    assert (tokens(found), found[-1].finish_reason) == ([500], "length")
    assert found[-1].kv_transfer_params is not None


async def test_a_seed_gives_other_tokens_unless_nothing_is_left_to_chance():
    plain, _ = expected_output(PROMPT, max_tokens=20, ignore_eos=True)
    one, again, two, greedy = [
        tokens(await outputs(SamplingParams(20, ignore_eos=True, seed=seed, temperature=temperature)))
        for seed, temperature in ((1, 1.0), (1, 1.0), (2, 1.0), (2, 0.0))
    ]
    assert greedy == plain
    assert one == again
    assert len({tuple(plain), tuple(one), tuple(two)}) == 3


async def test_logprobs_do_not_depend_on_how_tokens_came_together():
    found = await outputs(SamplingParams(20, ignore_eos=True, extras=SamplingExtras(logprobs=5, prompt_logprobs=2)))
    numbers = [one for output in found for one in output.logprobs or ()]
    assert [one[0][0] for one in numbers] == tokens(found)
    for one in numbers:
        assert len({token for token, _ in one}) == 5
        assert sum(math.exp(value) for _, value in one) <= 1
        assert all(OPTIONS.token_low <= token < OPTIONS.token_high for token, _ in one)
    of_prompt = [one for output in found for one in output.prompt_logprobs or ()]
    assert [one[0][0] for one in of_prompt[1:]] == PROMPT[1:]
    assert of_prompt[0] == ()


async def test_a_plain_request_has_no_numbers():
    """They would be sent with every token."""
    found = await outputs(SamplingParams(5))
    assert all(output.logprobs is None and output.prompt_logprobs is None for output in found)
