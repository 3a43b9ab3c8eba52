"""Tests the configuration that a plan for models becomes, and the words of other servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.config.loading import load_config
from dynamo_local.config.model_graph import (
    GraphPlan,
    ModelPlan,
    engine_options,
    gpus_of,
    graph_yaml,
    server_command,
)
from dynamo_local.config.resolve import resolve
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import BadInput
from dynamo_local.sdk.loader import load_graph

ONE = ModelPlan("/models/m", "m", 4, 2, {"max-model-len": 4096})


def spec_of(plan: GraphPlan) -> GraphSpec:
    """The graph that the plan's text gives."""
    assert plan.target is not None
    config = load_config(None, env={}, base=graph_yaml(plan))
    return resolve(load_graph(plan.target, base_dir=Path.cwd()), config, namespace=None)


@pytest.mark.parametrize(
    ("plan", "workers"),
    [
        (GraphPlan((ModelPlan("/m", "m", 1, 1),), "vllm", 8000), {"Frontend": 1, "Processor": 1, "VllmWorker": 1}),
        (GraphPlan((ONE,), "vllm", 8000), {"Frontend": 1, "Processor": 1, "Router": 1, "VllmWorker": 4}),
        (
            GraphPlan((ModelPlan("/m", "m", 4, 1, prefill=1),), "vllm", 8000, planner={"ttft": 200.0, "itl": 20.0}),
            {"Frontend": 1, "Processor": 1, "Router": 1, "VllmWorker": 3, "PrefillWorker": 1},
        ),
        (
            GraphPlan((ModelPlan("/a", "a", 2, 1), ModelPlan("/b", "b", 1, 4)), "vllm", 8000),
            {"Frontend": 1, "a_Processor": 1, "a": 2, "b_Processor": 1, "b": 1},
        ),
    ],
)
def test_the_text_is_a_graph_with_these_workers(plan: GraphPlan, workers: dict[str, int]) -> None:
    assert {each.name: each.workers for each in spec_of(plan).components} == workers


def test_the_head_says_why_and_how_it_is_served() -> None:
    text = graph_yaml(GraphPlan((ONE,), "vllm", 8000, reasons=("Because.",)), "plan.yaml")
    assert text.startswith("# Because.\n#\n#   dynamo serve dynamo_local.components.graphs:agg_router -f plan.yaml\n")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x85", "\u2028", "\x07"])
def test_a_word_of_several_lines_stays_a_comment_in_the_head(end: str) -> None:
    reason = f"One worker: bash -c 'cd /x{end}Host: {{insecure: true}}'"
    config = load_config(None, env={}, base=graph_yaml(GraphPlan((ONE,), "vllm", 8000, reasons=(reason, ""))))
    assert "Host" not in config.sections


def test_words_of_vllm_serve_become_options_of_the_engine_and_of_its_api() -> None:
    words = ["--max-num-seqs", "64", "--enforce-eager", "--dtype=float16", "-tp", "2", "--no-enable-prefix-caching"]
    words += ["--hf-overrides", '{"a": 1}', "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    engine, api = engine_options(words)
    assert engine == {
        "max_num_seqs": 64,
        "enforce_eager": True,
        "dtype": "float16",
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": 1},
    }
    assert api == {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--api-key", "secret"], "--api-key-file"),
        (["--port", "1"], "--port, before the --"),
        (["64"], "'64' after -- is no option"),
        (["-x", "1"], "'-x' after -- is no option"),
    ],
)
def test_words_that_have_no_place_behind_are_named(words: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        engine_options(words)
    assert "secret" not in str(refused.value)


def test_a_line_of_today_listens_where_its_frontend_expects_it() -> None:
    command, port = server_command(["vllm", "serve", "org/m", "--port", "8123", "--host=0.0.0.0", "-tp", "2"])
    assert command == ("vllm", "serve", "org/m", "-tp", "2", "--host", "127.0.0.1", "--port", "{port:http}")
    assert (port, gpus_of(command)) == (8123, 2)
    sglang, _ = server_command(["python", "-m", "sglang.launch_server", "--model-path", "m", "--tp=4"])
    assert sglang[-1] == "--enable-metrics"
    assert gpus_of(sglang) == 4
    assert server_command(["any", "--port", "9"]) == (("any", "--port", "{port:http}"), 9)
    assert server_command(["llama-server", "-p", "{port:http}"]) == (("llama-server", "-p", "{port:http}"), None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama-server", "-m", "x.gguf"], "where does it listen"),
        (["vllm", "serve", "m", "--api-key", "secret"], "--api-key-file FILE"),
        (["vllm", "serve", "m", "--port", "x"], "a port is a number"),
        (["vllm", "serve", "m", "--ssl-keyfile=k.pem"], "--ssl-keyfile: its Frontend asks it over plain HTTP"),
        (["vllm", "serve", "m", "--uds", "/tmp/s"], "--uds: its Frontend asks it on a port"),
    ],
)
def test_a_command_that_cannot_be_reached_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        server_command(words)
    assert "secret" not in str(refused.value)
