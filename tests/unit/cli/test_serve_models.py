"""Tests `dynamo serve --model …` up to the start: what it decides, what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_local.cli import serve_models
from dynamo_local.config.loading import load_config
from dynamo_local.core.gpus import GpuDevice, GpuProcess
from dynamo_local.core.types import Missing
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_OK, ConfigError
from dynamo_local.state.schema import Environment, State
from dynamo_local.system import gpu_pool
from dynamo_local.system.paths import Paths
from tests.fakes.arbiter.scripted_arbiter import dynamo
from tests.unit.config.test_model_folder import tensors
from tests.unit.core.test_model_facts import PLAIN


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with an 8B model's shape and few bytes of weights."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Model-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**PLAIN, "vocab_size": 2048}))
    tensors(folder / "model.safetensors", 1024)
    return str(folder)


class Asked:
    """`dynamo serve …` with these words: its exit code, lines, and errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        self.code = dynamo(monkeypatch, "serve", *words)
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.out)
        return answer


def test_the_decision_is_told_in_at_most_ten_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    words = ("--model", model, "--engine", "vllm", "--gpus", "sim:4", "--ttft", "200", "--itl", "20", "--dry-run")
    asked = Asked(monkeypatch, capsys, *words)
    assert asked.code == EXIT_OK
    lines = asked.out.splitlines()
    assert len(lines) <= 10
    assert lines[0] == "GPUs: 4 free, Simulated GPU 80GB, 85.9 GB each"
    assert "Model-8B: LlamaForCausalLM, weights 0.00102 MB, 32 layers of GQA (8 of 32 heads)" in lines[1]
    assert "131,072 bytes per token" in asked.out
    assert "dynamo profile" in lines[-1], "no profile fits: it names the command that measures"


def test_the_numbers_are_there_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    answer = Asked(monkeypatch, capsys, "--model", model, "--gpus", "sim:4", "--dry-run", "--json").json
    (one,) = answer["models"]
    assert (one["engines"], one["gpus_per_engine"], one["max_model_len"]) == (4, 1, 131072)
    assert (one["weights_bytes"], one["kv_bytes_per_token"]) == (1024, 131072)
    assert answer["graph"] == "dynamo_local.components.graphs:agg_router"


def test_the_plan_is_kept_as_a_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path, namespace: str
) -> None:
    asked = Asked(monkeypatch, capsys, "--model", model, "--gpus", "sim:4", "--write", "plan.yaml", "--dry-run")
    assert asked.code == EXIT_OK
    config = load_config(tmp_path / "plan.yaml", env={})
    assert config.service("VllmWorker")["model"] == model
    words = ("dynamo_local.components.graphs:agg_router", "-f", "plan.yaml", "-n", namespace, "--dry-run")
    assert Asked(monkeypatch, capsys, *words).code == EXIT_OK


def test_words_behind_go_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    words = ("--model", model, "--engine", "vllm", "--gpus", "sim:4", "--dry-run", "--json")
    behind = ("--", "--max-num-seqs", "64", "-tp", "2", "--max-model-len", "4096", "--tool-call-parser", "hermes")
    answer = Asked(monkeypatch, capsys, *words, *behind).json
    (one,) = answer["models"]
    assert (one["engines"], one["gpus_per_engine"], one["max_model_len"]) == (2, 2, 4096)
    assert "max-num-seqs: 64" in answer["configuration"]
    assert "tool-call-parser: hermes" in answer["configuration"]
    assert "tensor-parallel-size" not in answer["configuration"], "it follows resources.gpu"


def test_two_models_share_a_port_and_the_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    words = ("--model", model, "--model", "sim-tiny", "--served-model-name", "a", "--served-model-name", "b")
    answer = Asked(monkeypatch, capsys, *words, "--gpus", "sim:5", "--dry-run", "--json").json
    assert [(one["name"], one["engines"]) for one in answer["models"]] == [("a", 3), ("b", 2)]
    assert answer["graph"] == "dynamo_local.components.graphs:models__a__b"
    models = yaml.safe_load(answer["configuration"])["Models"]
    assert {name: (each["workers"], each["floor"]) for name, each in models.items()} == {"a": (3, 1), "b": (2, 1)}


def test_models_that_do_not_fit_together_take_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name in "abc" for word in ("--model", "sim-tiny", "--served-model-name", name)]
    answer = Asked(monkeypatch, capsys, *words, "--gpus", "sim:2", "--dry-run", "--json").json
    assert [one["engines"] for one in answer["models"]] == [1, 1, 0]
    assert "Together they need 3 GPUs" in "\n".join(answer["reasons"])
    models = yaml.safe_load(answer["configuration"])["Models"]
    assert [each["floor"] for each in models.values()] == [0, 0, 0]


def test_a_command_behind_is_a_server_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    words = ("--gpus", "sim:4", "--dry-run", "--json", "--", "vllm", "serve", model, "-tp", "2", "--port", "8123")
    answer = Asked(monkeypatch, capsys, *words).json
    assert answer["graph"] is None
    assert answer["models"][0]["gpus_per_engine"] == 2
    assert "port: 8123" in answer["configuration"]
    assert "runtime: http" in answer["configuration"]


def test_sglang_and_other_servers_are_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    words = ("--model", model, "--gpus", "sim:2", "--dry-run", "--json", "--engine")
    sglang = Asked(monkeypatch, capsys, *words, "sglang").json["configuration"]
    assert "sglang.launch_server" in sglang
    assert "--context-length" in sglang
    other = Asked(monkeypatch, capsys, *words, "llama-server -m {model} --port {port:http}").json["configuration"]
    assert "metrics: null" in other


def test_several_commands_share_the_gpus_under_the_names_that_they_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    words = ("--model", model, "--model", "/m/b.gguf", "--model", "/m/c.gguf", "--gpus", "sim:2", "--dry-run", "--json")
    answer = Asked(monkeypatch, capsys, *words, "--engine", "llama-server -m {model} --port {port:http}").json
    assert "Together they need 3 GPUs" in "\n".join(answer["reasons"])
    models = yaml.safe_load(answer["configuration"])["Models"]
    assert {name: (each["workers"], each["floor"]) for name, each in models.items()} == {
        "Model-8B": (1, 0), "b": (1, 0), "c": (0, 0),
    }  # fmt: skip
    assert "--alias" in models["b"]["command"]
    other = Asked(monkeypatch, capsys, *words, "--engine", "serve {model} --port {port:http}").json["configuration"]
    assert yaml.safe_load(other)["Models"]["b"]["served-model-name"] == "b", "a server of which we know no such option"


def test_a_folder_without_a_tokenizer_is_planned_and_not_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    words = ("--model", model, "--engine", "sim")
    planned = Asked(monkeypatch, capsys, *words, "--dry-run")
    served = Asked(monkeypatch, capsys, *words)
    assert (planned.code, served.code) == (EXIT_OK, EXIT_BAD_INPUT)
    assert "has no tokenizer.json" in planned.err
    assert "has no tokenizer.json" in served.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "{model}", "--engine", "vllm", "--gpus", "sim:1", "--max-model-len", "200000"), "at most 131,072"),
        (("--model", "{model}", "--engine", "nothing"), "is none of sim, vllm, sglang, and no command"),
        (("--model", "{model}", "--engine", "sim", "--", "--max-num-seqs", "1"), "the sim engine takes none"),
        (("--model", "{model}", "--model", "{model}", "--engine", "sim"), "two models are named 'Model-8B'"),
        (("--model", "{model}", "--model", "sim-tiny", "--ttft", "5"), "the workers of one model"),
        (("--model", "{model}", "graphs:agg"), "say one of the two"),
        (("--model", "{model}", "--gpus", "sim:2", "--engine", "vllm", "--", "-pp", "2"), "--write FILE"),
        (("--model", "{model}", "--gpus", "sim:2", "--served-model-name", "a", "--served-model-name", "b"), "2 times"),
        (("--port", "9000"), "--port is about --model"),
        (("--write", "x.yaml"), "name a model"),
        (("--model", "{model}", "--engine", "sim", "--write", "/nowhere/x.yaml"), "cannot write /nowhere/x.yaml"),
        (("--model", "missing"), "hf download"),
        (("--model", ""), "--model is empty"),
        (("--model", "sim-tiny", "--served-model-name", "a\nFrontend: {host: 0.0.0.0}"), "cannot be printed"),
        (
            ("--model", "sim-tiny", "--model", "sim-tiny", "--served-model-name", "é", "--served-model-name", "ü"),
            "the models 'é' and 'ü' differ in signs or case only",
        ),
        (("--model", "sim-tiny", "--engine", "vllm"), "say --engine sim"),
        (("--model", "sim-tiny", "--engine", "sglang"), "say --engine sim"),
        (("--model", "sim-tiny", "--served-model-name", ""), "--served-model-name is empty"),
        (("--", "server", "--model", "m"), "where does it listen"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    words: tuple[str, ...],
    said: str,
) -> None:
    given = [word.replace("{model}", model) for word in words]
    at = given.index("--") if "--" in given else len(given)
    asked = Asked(monkeypatch, capsys, *given[:at], "--dry-run", *given[at:])
    assert asked.code == EXIT_BAD_INPUT
    assert said in asked.err
    assert asked.err.count("\n") == 1


class Cards:
    """Three real cards: one is somebody else's."""

    simulated = False

    def sample(self) -> tuple[GpuDevice, ...]:
        stranger = (GpuProcess(4242, "python", 60 * 10**9),)
        return tuple(
            GpuDevice(at, f"GPU-{at}", "NVIDIA H100 80GB HBM3", 85_520_809_984, 0, stranger if at == 1 else ())
            for at in range(3)
        )

    def close(self) -> None:
        """Nothing is held."""


def test_cards_that_others_use_are_left_to_them(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(serve_models, "open_inventory", lambda _gpus, _env: Cards())
    served = serve_models.decide(serve_models.ModelWords(models=(model,)), {})
    assert served.plan.engine == "vllm"
    assert [(one.engines, one.gpus) for one in served.plan.models] == [(2, 1)]
    assert served.plan.host_gpus is None, "the start looks again"


def test_targets_take_the_profile_that_ships_for_this_model_and_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    monkeypatch.setattr(serve_models, "open_inventory", lambda _gpus, _env: Cards())
    folder = Path(model).rename(tmp_path / "Qwen3-8B")
    words = serve_models.ModelWords(models=(str(folder),), ttft_ms=300.0, itl_ms=20.0)
    planner = serve_models.decide(words, {}).plan.planner
    assert planner is not None
    assert planner["profile-results-dir"] == "Qwen3-8B_h100_sxm_vllm_tp1"


KV = "kv-cache-memory-bytes"


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, free: int | Missing) -> None:
    """vLLM's CPU build on a host with so much free memory."""
    monkeypatch.setattr(serve_models, "_cpu_vllm", lambda: True)
    monkeypatch.setattr(gpu_pool, "host_free_bytes", lambda: free)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this host has an NVIDIA driver")
def test_workers_on_a_cpu_that_are_adopted_keep_their_kv_and_their_memory_counts_as_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    env = {"DYN_LOCAL_STATE_DIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    on_a_cpu(monkeypatch, 10 * 10**9)
    began = serve_models.decide(serve_models.ModelWords(models=(model,)), env).plan.models[0].options
    sections = json.dumps({"VllmWorker": {KV.replace("-", "_"): began[KV]}, "Frontend": {}})
    state = State(namespace="dynamo", run_id="01J", environment=Environment(DYNAMO_SERVICE_CONFIG=sections))
    statefile = Paths.found("dynamo", env).statefile
    statefile.write_text(state.model_dump_json())
    statefile.chmod(0o600)
    on_a_cpu(monkeypatch, 10**9)
    assert (
        serve_models.decide(serve_models.ModelWords(models=(model,), adopt=True), env).plan.models[0].options == began
    )
    with pytest.raises(ConfigError, match="does not fit"):
        serve_models.decide(serve_models.ModelWords(models=(model,)), env)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this host has an NVIDIA driver")
def test_two_models_are_planned_on_a_cpu_whose_free_memory_is_not_known(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    on_a_cpu(monkeypatch, Missing("no /proc"))
    words = serve_models.ModelWords(models=(model, model), names=("a", "b"))
    assert [one.engines for one in serve_models.decide(words, {}).plan.models] == [1, 1]
