"""Several profiles: which engines keep the targets with fewer GPUs, and what the configuration must say for them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from dynamo_local.cli.plan import plan as command
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import BadInput
from dynamo_local.profile.document import Document, read_document, write_document
from dynamo_local.simulator.metrics import Spread
from dynamo_local.simulator.options import FleetShape
from dynamo_local.simulator.sizing import Candidate, Engines, Planned, Tried, differing, merged, ranked, sections_of
from tests.fakes.profile_documents import document, engine
from tests.fakes.profile_folders import MAX_KV_TOKENS, decode_arrays, prefill_arrays, write_npz
from tests.tools.answers import read_answer

LIMITS = {"max_kv_tokens": MAX_KV_TOKENS, "context_length": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
TARGETS = ("--ttft", "400", "--itl", "30", "--gpus", "2")
LIMITS = {"max_kv_tokens": MAX_KV_TOKENS, "context_length": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 8192}


def measured(gpus: int = 1, **options: Any) -> Document:
    """Prefill and decode engines with these."""
    facts = {**LIMITS, "gpus": gpus, "options": {"model": "tiny", **options}}
    made = {
        role: msgspec.structs.replace(engine(), component=component, **facts)
        for role, component in (("prefill", "PrefillWorker"), ("decode", "VllmWorker"))
    }
    return document(engines=made)


def folder(path: Path, slower: float, gpus: int = 1, **options: Any) -> str:
    """A profile whose engine takes `slower` times as long."""
    prefill, decode = prefill_arrays(), decode_arrays()
    for arrays, ms, thpt in ((prefill, "prefill_ttft", "prefill_thpt_per_gpu"), (decode, "z_itl", "z_thpt_per_gpu")):
        arrays[ms] = [value * slower for value in arrays[ms]]
        arrays[thpt] = [value / slower for value in arrays[thpt]]
    name = write_npz(path, prefill, decode)
    write_document(path, measured(gpus, **options))
    return name


def planned(*profiles: str) -> dict[str, Any]:
    """What the command says, as JSON, of sixty prompts of 2,000 tokens at 12 a second (50 ms each)."""
    trace = Path(profiles[0]).parent / "trace.jsonl"
    rows = [{"timestamp": n * 1000 // 12, "input_length": 2000, "output_length": 10, "hash_ids": []} for n in range(60)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for profile in profiles for word in ("--profile", profile)]
    command_line = [*TARGETS, "--trace", str(trace), *words, "--json"]
    done = CliRunner().invoke(command, command_line, catch_exceptions=False, standalone_mode=False)
    return dict(read_answer(["plan"], done.stdout))


def test_of_two_settings_the_one_that_keeps_the_targets_is_named_and_written(tmp_path):
    quick = folder(tmp_path / "quick", 1.0, max_num_seqs=64.0, block_size=16.0)
    slow = folder(tmp_path / "slow", 2.0, max_num_seqs=256.0, block_size=16.0)
    for order in ((quick, slow), (slow, quick)):
        told = planned(*order)
        assert told["profile"] == quick
        assert [(row["profile"], row["attained"]) for row in told["profiles"]] == [(quick, True), (slow, False)]
        assert told["profiles"][1]["settings"]["decode"] == {"max_num_seqs": 256.0}
        assert told["attainment_low"] <= told["attainment_high"]
        written = yaml.safe_load(told["yaml"])
        assert written["VllmWorker"]["max-num-seqs"] == 64
        assert "block-size" not in written["VllmWorker"]
        assert written["VllmWorker"]["ServiceArgs"]["workers"] >= 1
        assert written["Planner"]["profile-results-dir"] == quick


def found(
    gpus: int, *, attained: bool, attainment: float, lowest: float = 0.9, ttft_ms: float | None = 100.0
) -> tuple[Engines, Planned]:
    """A plan with a profile whose name says all of it."""
    name = f"{gpus} GPUs, {attained}, {attainment}, {lowest}, {ttft_ms}"
    metrics = SimpleNamespace(attainment=attainment, ttft_ms=Spread(p95=ttft_ms))
    best = Tried(FleetShape(1, gpus - 1), gpus, metrics)  # type: ignore[arg-type]  # as much as is looked at
    engines = Engines(name, SimOptions(), 1, 1, 0.05, None)
    return engines, Planned(best, attained, lowest, 1.0, (), 1)


def test_fewer_gpus_win_then_attainment_then_ttft_and_those_that_miss_the_targets_come_last():
    order = [
        found(2, attained=True, attainment=0.96),
        found(3, attained=True, attainment=0.97, lowest=0.96),
        found(3, attained=True, attainment=0.99, lowest=0.91, ttft_ms=40.0),
        found(3, attained=True, attainment=0.99, lowest=0.91),
        found(3, attained=True, attainment=0.99, lowest=0.91, ttft_ms=None),
        found(4, attained=False, attainment=0.9),
        found(1, attained=False, attainment=0.2),
    ]
    ranks = [each.engines.profile for each in ranked([*reversed(order)])]
    assert ranks == [engines.profile for engines, _ in order]


def test_gpus_of_a_worker_are_written_where_profiles_differ_in_them(tmp_path):
    one, two = folder(tmp_path / "tp1", 1.0, gpus=1), folder(tmp_path / "tp2", 0.5, gpus=2)
    with pytest.raises(BadInput, match="no fleet fits on 2 GPUs"):
        planned(two)
    known = [read_document(Path(name)) for name in (one, two)]
    engines, plan = found(2, attained=True, attainment=1.0)
    settings = differing(known)[1]
    written = sections_of(Candidate(engines, plan, settings), {"prefill": "PrefillWorker", "decode": "VllmWorker"})
    assert written["PrefillWorker"] == {"ServiceArgs": {"resources": {"gpu": 2}}}


def test_only_what_differs_among_those_that_say_it_is_told(tmp_path):
    agg = document(engines={"agg": engine()})
    assert differing([None, measured(a=1.0, b=2.0), measured(a=1.0, b=3.0), agg]) == [
        {},
        {"prefill": {"b": 2.0}, "decode": {"b": 2.0}},
        {"prefill": {"b": 3.0}, "decode": {"b": 3.0}},
        {"agg": {}},
    ]


@pytest.mark.parametrize(
    ("section", "more", "both"),
    [
        ({"A": {"x": 1}}, {"A": {"y": 2}, "B": 3}, {"A": {"x": 1, "y": 2}, "B": 3}),
        ({"A": {"S": {"workers": 2}}}, {"A": {"S": {"r": 1}}}, {"A": {"S": {"workers": 2, "r": 1}}}),
        ({"A": 1}, {"A": {"y": 2}}, {"A": {"y": 2}}),
    ],
)
def test_sections_are_merged_whole(section, more, both):
    assert merged(section, more) == both
