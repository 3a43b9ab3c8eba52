"""`dynamo plan --model` and `dynamo simulate --model`: several models on the GPUs of one host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.simulator.generator import generate, parse_generated
from dynamo_local.simulator.mix_plans import Loaded, best_splits, fixed_curve, most_kept, parse_model, plan, together
from dynamo_local.simulator.trace import write_trace
from tests.fakes.arbiter.scripted_arbiter import dynamo

PROFILE = "Qwen3-8B_h100_sxm_vllm_tp1"
TARGETS = ("--profile", PROFILE, "--ttft", "2000", "--itl", "40")
USUAL = {"profile": PROFILE, "ttft": 2000.0, "itl": 40.0}
BUSY, QUIET = "busy=chat,rate=3,duration=600", "quiet=chat,rate=0.2,duration=600,seed=3,wake-s=2"


def loaded(*texts: str) -> list[Loaded]:
    return [parse_model(text, USUAL, None) for text in texts]


def answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, Any]:
    code = dynamo(monkeypatch, *words, "--json")
    return code, json.loads(capsys.readouterr().out)


def test_models_that_share_gpus_need_no_more_than_the_smallest_count_that_keeps_the_targets() -> None:
    models = loaded(BUSY, QUIET)
    planned = plan(models, 8, 0.95)
    assert planned.attained
    assert planned.together.share >= 0.95
    assert together(models, planned.together.gpus - 1).share < 0.95
    for model in models:
        needed = planned.apart[model.name]
        assert needed is not None
        assert needed in dict(fixed_curve(model))


def test_two_models_that_are_never_busy_at_once_share_one_worker_s_gpus(tmp_path: Path) -> None:
    """One has requests in the first half, the other in the second. The host needs the GPUs of one of them."""
    requests = list(generate(parse_generated("chat,rate=1,duration=500").options))
    early, late = tmp_path / "early.jsonl", tmp_path / "late.jsonl"
    write_trace(early, requests)
    write_trace(late, requests)
    models = loaded(f"early={early},wake-s=1", f"late={late},wake-s=1")
    shifted = [type(each)(each.at_s + 600, each.input_length, each.output_length) for each in models[1].requests]
    models[1] = Loaded("late", models[1].engine, shifted)
    planned = plan(models, 8, 0.9)
    assert planned.attained
    assert planned.together.gpus == max(each or 0 for each in planned.apart.values())


def test_the_best_fixed_split_may_leave_a_model_out_and_the_other_may_not() -> None:
    best, of_all = best_splits(loaded(BUSY, QUIET), 2)
    assert of_all is not None
    assert sum(best.gpus.values()) <= 2
    assert best.gpus["busy"] == 2
    assert of_all.gpus == {"busy": 1, "quiet": 1}
    assert 0 < of_all.share <= best.share <= 1
    assert best_splits(loaded(BUSY, QUIET), 1)[1] is None


def test_one_point_of_each_curve_is_taken() -> None:
    assert most_kept([{0: 0, 1: 5, 2: 9}, {0: 0, 2: 7}], 3) == ((1, 2), 12)
    assert most_kept([{0: 0, 1: 5, 2: 9}, {0: 0, 2: 7}], 2) == ((2, 0), 9)


def test_a_floor_is_there_from_the_beginning() -> None:
    free, kept = (together(loaded(f"{BUSY},floor={floor}"), 4) for floor in (0, 3))
    assert kept.result.ttfts_s[0] < 1 < free.result.ttfts_s[0]


def test_prefill_workers_take_gpus_and_let_one_worker_keep_more_within_the_targets() -> None:
    """One worker for a load that is too much for one that computes its prompts itself."""
    heavy = "rate=3,duration=300,isl=4000"
    alone, apart = loaded(f"a=chat,{heavy},cap=1", f"a=chat,{heavy},cap=1,prefill=2")
    assert apart.engine.gpus == 3 * alone.engine.gpus
    assert together([apart], 3).share > 0.9 > together([alone], 3).share


def test_both_commands_answer_as_their_schemas_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, planned = answer(capsys, monkeypatch, "plan", "--model", BUSY, "--model", QUIET, *TARGETS)
    assert code == 0
    assert planned["attained"] is True
    code, simulated = answer(
        capsys, monkeypatch, "simulate", "--model", BUSY, "--model", QUIET, *TARGETS, "--gpus", f"sim:{planned['gpus']}"
    )
    assert code == 0
    assert simulated["attainment"] == planned["attainment"]
    assert [each["name"] for each in simulated["models"]] == ["busy", "quiet"]
    quiet = simulated["models"][1]
    assert quiet["requests"] < len(loaded(QUIET)[0].requests), "those of the first fifth are not counted"
    assert quiet["wait_s_p99"] < 30, "nor in the times: at the beginning no worker is there"


def test_too_few_gpus_are_said_and_end_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dynamo(monkeypatch, "plan", "--model", BUSY, *TARGETS, "--gpus", "1") == 1
    told = capsys.readouterr().out
    assert told.startswith("with --gpus 1 too few requests are within the targets (95% wanted):\nMODEL")
    assert "each on GPUs of its own: " in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "busy"), "it is NAME=TRACE"),
        (("--model", "busy=chat,rate=3,nonsense=1"), "nonsense"),
        (("--model", "busy=chat,rate=3,gpus"), "'gpus' is no KEY=VALUE"),
        (("--model", "busy=chat,rate=3,gpus=1,gpus=2"), "gpus is given twice"),
        (("--model", "busy=chat,rate=3,gpus=none"), "gpus"),
        (("--model", "busy=/no/such/file"), "/no/such/file"),
        (("--model", BUSY, "--model", BUSY), "--model busy is given twice"),
        (("--model", f"{BUSY},itl=0.001"), "one request alone has"),
        (("--model", f"{BUSY},isl=1000000,isl-max=1000000,isl-sigma=0"), "longer than the profile's KV cache"),
        (("--model", f"{BUSY},floor=9"), "floors"),
        (("--model", f"{BUSY},floor=3,cap=2"), "cap is 2, less than the floor"),
        (("--model", BUSY, "--policy", "slo"), "--policy does not go with --model"),
        (("--model", BUSY, "--static", "1,1"), "--static does not go with --model"),
    ],
)
def test_what_cannot_be_is_refused_with_2(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dynamo(monkeypatch, "simulate", *words, *TARGETS) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"), [(("--ttft", "500"), "whose times has it?"), (("--profile", PROFILE), "there is no target")]
)
def test_a_model_needs_times_and_a_target(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dynamo(monkeypatch, "simulate", "--model", BUSY, *words) == 2
    assert said in capsys.readouterr().err
