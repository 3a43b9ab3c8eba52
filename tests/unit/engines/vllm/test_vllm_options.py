"""From a worker's section to vLLM's command line, without vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_local.components.engine_options import start_engine
from dynamo_local.components.prefill_worker import PrefillWorkerConfig
from dynamo_local.components.vllm_worker import VllmWorkerConfig
from dynamo_local.engines import make_engine
from dynamo_local.engines.vllm.options import VllmOptions
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.settings import validate_section


def section(**values: Any) -> VllmWorkerConfig:
    return validate_section(VllmWorkerConfig, "VllmWorker", values)


def option(words: list[str], name: str) -> str | None:
    """The value of `--name`, in either way of writing it."""
    for n, word in enumerate(words):
        if word == f"--{name}":
            return words[n + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None


def test_a_model_of_its_own_means_vllm_and_the_built_in_one_the_simulation() -> None:
    assert section().engine_name == "sim"
    assert section(model="/models/llama").engine_name == "vllm"
    assert section(model="/models/llama", engine="sim").engine_name == "sim"


def test_keys_that_are_not_ours_become_vllm_arguments() -> None:
    """Numbers, switches in both positions, mappings and lists, under vLLM's own names."""
    words = (
        section(
            model="/models/llama",
            max_model_len=4096,
            block_size=32,
            enforce_eager=True,
            enable_prefix_caching=False,
            compilation_config={"level": 3},
            served_model_name="llama",
            cudagraph_capture_sizes=[1, 2],
            quantization=None,
        )
        .vllm_options(0)
        .arguments()
    )
    assert option(words, "model") == "/models/llama"
    assert option(words, "max-model-len") == "4096"
    assert option(words, "block-size") == "32"
    assert "--enforce-eager" in words
    assert "--no-enable-prefix-caching" in words
    assert json.loads(option(words, "compilation-config") or "") == {"level": 3}
    at = words.index("--cudagraph-capture-sizes")
    assert words[at + 1 : at + 3] == ["1", "2"]
    assert not any("quantization" in word or "max-num-waiting" in word for word in words)


@pytest.mark.parametrize(
    ("gpus", "args", "size"),
    [
        (0, {}, None),
        (1, {}, "1"),
        (4, {}, "4"),
        (4, {"tensor_parallel_size": 4}, "4"),
        (4, {"pipeline_parallel_size": 2}, "2"),
    ],
)
def test_tensor_parallelism_follows_the_gpus_of_a_worker(gpus: int, args: dict[str, Any], size: str | None) -> None:
    assert option(VllmOptions("m", gpus=gpus, args=args).arguments(), "tensor-parallel-size") == size


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 4, "args": {"tensor_parallel_size": 2}}, "needs 2 GPUs, but resources.gpu is 4"),
        ({"gpus": 3, "args": {"pipeline_parallel_size": 2}}, "cannot be divided by 2"),
        ({"gpus": 1, "args": {"tensor_parallel_size": "two"}}, "tensor-parallel-size must be a whole number"),
        ({"args": {"port": 8000}}, "port has no place"),
        ({"transfer": "consumer", "kv_pull_timeout_s": 30.0}, "kept for 30 s only"),
        ({"transfer": "consumer", "args": {"kv_transfer_config": "nixl"}}, "must be a mapping"),
    ],
)
def test_what_cannot_be_is_refused_before_vllm_is_asked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VllmOptions("m", **options).arguments()


def test_each_side_of_a_hand_off_gets_its_connector() -> None:
    decode = section(model="m", remote_prefill=True, kv_transfer_config={"kv_buffer_size": 1})
    prefill = validate_section(PrefillWorkerConfig, "PrefillWorker", {"model": "m"})
    asked = [json.loads(option(c.vllm_options(1).arguments(), "kv-transfer-config") or "") for c in (decode, prefill)]
    assert [config["kv_role"] for config in asked] == ["kv_consumer", "kv_producer"]
    assert {config["kv_connector"] for config in asked} == {"NixlConnector"}
    assert {config["kv_load_failure_policy"] for config in asked} == {"fail"}
    assert asked[0]["kv_buffer_size"] == 1
    assert option(section(model="m").vllm_options(1).arguments(), "kv-transfer-config") is None


def test_a_longer_lease_allows_a_longer_wait() -> None:
    longer = {"kv_connector_extra_config": {"kv_lease_duration": 120}}
    section(model="m", remote_prefill=True, kv_pull_timeout_s=60, kv_transfer_config=longer)
    with pytest.raises(ConfigError, match="kv-pull-timeout-s is 60, but the KV is kept for 30 s"):
        section(model="m", remote_prefill=True, kv_pull_timeout_s=60)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"block_size": 32}, r"unknown key 'block_size'; allowed: .*model"),
        ({"max_num_waitin": 5}, "did you mean 'max-num-waiting'"),
        ({"engine": "vllm"}, "sim-tiny, which only the sim engine has"),
        ({"engine": "vllm", "model": "m", "sim": {"speed": 2.0}}, "no effect with engine vllm"),
        ({"engine": "tgi"}, "engine"),
    ],
)
def test_the_simulation_takes_none_of_vllms_keys_and_the_other_way_round(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        section(**values)


async def test_an_engine_without_vllm_says_what_is_missing() -> None:
    pytest.importorskip  # noqa: B018  # vLLM may be installed where the units run: then there is nothing to show
    from dynamo_local.engines.vllm.checks import is_installed

    if is_installed():
        return
    with pytest.raises(ConfigError, match="not installed"):
        await start_engine(section(model="/models/llama"), 0)


def test_the_vllm_engine_needs_its_options() -> None:
    with pytest.raises(ConfigError, match="VllmOptions"):
        make_engine("vllm", {"model": "m"})
