"""`dynamo import FILE`: kinds are recognised, `serve --dry-run` takes the result, and nothing goes in silence."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_local.cli.main import main
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_OK, ConfigError
from dynamo_local.kubernetes.importing.commands import imported, kind_of
from dynamo_local.kubernetes.importing.servers import program_of
from dynamo_local.kubernetes.importing.shell_commands import commands, single
from dynamo_local.kubernetes.manifests import NotCarried

LLAMA_SWAP = """\
healthCheckTimeout: 500
macros:
  llama: >
    /opt/llama-server --port ${PORT}
  ctx: 4096
models:
  small:
    macros: {ctx: 16384}
    cmd: |
      # a comment
      ${llama}
      -m small.gguf --ctx-size ${ctx}
    env: ["CUDA_VISIBLE_DEVICES=0,1"]
    aliases: [gpt-4o-mini]
    checkEndpoint: /ready
    ttl: 60
  "big:8b":
    cmd: vllm serve Qwen/Qwen3-8B --port ${PORT} -tp 2 --served-model-name x
    aliases: [big]
  boxed:
    cmd: docker run --rm --init -p ${PORT}:8080 ghcr.io/ggml-org/llama.cpp:server-cuda -m /m.gguf
  away:
    cmd: ${nowhere} --port ${PORT}
groups: {g: {members: [small]}}
"""
PROCESS_COMPOSE = """\
version: "0.5"
environment: ["HF_HOME=/data"]
processes:
  engine:
    command: vllm serve Qwen/Qwen3-0.6B --port 8100 --host 0.0.0.0
    environment: ["HF_TOKEN=abc"]
    readiness_probe: {http_get: {path: /health, port: 8100}}
    availability: {restart: on_failure}
  web:
    command: echo hi && python -m http.server $PORT
    working_dir: /srv
    environment: ["PORT=9009"]
    readiness_probe: {http_get: {host: 127.0.0.1, path: /, port: 9009}}
  old: {command: sleep 5, disabled: true}
"""
DOCKER_COMPOSE = """\
services:
  vllm:
    image: vllm/vllm-openai:${TAG:-latest}
    ipc: host
    ports: ["8000:8000"]
    volumes: ["~/.cache/huggingface:/root/.cache/huggingface", "/srv/models:/models:ro", "named:/cache"]
    environment: ["HUGGING_FACE_HUB_TOKEN=${HF_TOKEN}", "VLLM_LOGGING_LEVEL=INFO"]
    command: --model=/models/Mistral-7B-v0.1 --chat-template /models/t.jinja --tensor-parallel-size 2
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}
  lost:
    image: vllm/vllm-openai
    command: --model ${NOWHERE}
  webui:
    image: open-webui
"""
SCRIPT = """\
#!/bin/bash
source venv/bin/activate
MODEL=Qwen/Qwen3-0.6B
export VLLM_LOGGING_LEVEL=DEBUG
CUDA_VISIBLE_DEVICES=0 vllm serve $MODEL --port ${PORT:-8100} \\
    --max-model-len 4096 > vllm0.log 2>&1 &
CUDA_VISIBLE_DEVICES=1 vllm serve "$MODEL" --port 8101 \\
    --max-model-len 4096 &
nohup python3 -m sglang.launch_server --model-path llama --tp 2 --api-key s3cret &
for ((i=0; i<2; i++)); do
  vllm serve x --port 900$i &
done
vllm serve y --nnodes 2
cat <<END > x
vllm serve no
END
docker run --gpus '"device=0,1"' -p 8000:8000 -e HF_TOKEN=$HF_TOKEN -v /srv:/m vllm/vllm-openai --model /m/z -tp 2
wait
"""


def result(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Sections, and the notes as `line: key` -> text."""
    sections, notes = imported(text, "f", kind_of(text, "f"), {})
    return sections, {note.where.removeprefix("f:"): note.text for note in notes}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (LLAMA_SWAP, "llama-swap"),
        (PROCESS_COMPOSE, "process-compose"),
        (DOCKER_COMPOSE, "docker-compose"),
        (SCRIPT, "shell script"),
        ("vllm serve x\n", "shell script"),
        ("docker run vllm/vllm-openai --model x\n", "shell script"),
        ("apiVersion: nvidia.com/v1beta1\nkind: DynamoGraphDeployment\n", "kubernetes"),
    ],
)
def test_the_kind_is_recognised_by_content(text: str, kind: str) -> None:
    assert kind_of(text, "f") == kind


def test_llama_swap_models_share_the_gpus_under_their_names() -> None:
    sections, notes = result(LLAMA_SWAP)
    assert sections["Frontend"] == {"port": 8080}
    small, big, boxed = (sections["Models"][name] for name in ("small", "big:8b", "boxed"))
    assert small["command"] == (
        "/opt/llama-server --model {model} --host 127.0.0.1 --port {port:http} --ctx-size 16384 --alias small --metrics"
    )
    assert (small["health"], small["gpus"], small["idle-s"], small["max-wait-s"]) == ("/ready", 2, 60, 500)
    assert big["command"].endswith("-tp 2 --served-model-name big:8b big")
    assert (big["aliases"], big["gpus"], "idle-s" in big) == (["big"], 2, False)
    assert boxed["model"] == "/m.gguf"
    assert notes["23: models.away.cmd"] == "${nowhere} is no macro of this file"
    assert "24: groups" in notes
    assert {"1: healthCheckTimeout", "16: models.small.ttl"}.isdisjoint(notes)
    assert notes["14: models.small.aliases"] == "gpt-4o-mini: llama.cpp has one name only"


def test_a_model_of_llama_swap_without_a_gpu_is_a_service_of_its_own() -> None:
    sections, _ = result("models:\n  a: {cmd: 'llama-server --port ${PORT} -m a.gguf -ngl 0'}\n")
    assert sections["A"]["ServiceArgs"]["resources"] == {"gpu": 0}
    assert "Models" not in sections


def test_a_service_of_its_own_has_further_names_in_its_command_only() -> None:
    text = "models:\n  a: {cmd: 'vllm serve m --port ${PORT} --device cpu', aliases: [b]}\n"
    sections, _ = result(text)
    assert sections["A"]["command"].endswith("--served-model-name a b")
    assert "aliases" not in sections["A"]


def test_process_compose_keeps_servers_and_the_processes_beside_them() -> None:
    sections, notes = result(PROCESS_COMPOSE)
    assert sections["Engine"]["ServiceArgs"]["envs"] == {"HF_HOME": "/data"}
    assert sections["Web"]["command"] == "env -C /srv bash -c 'echo hi && python -m http.server $PORT'"
    assert sections["Web"]["health-url"] == "http://127.0.0.1:9009/"
    assert notes["5: processes.engine.command: HF_TOKEN"] == "export HF_TOKEN before dynamo serve"
    assert notes["14: processes.old"] == "it is disabled"
    assert "8: processes.engine.availability" in notes


def test_compose_services_become_servers_of_this_host() -> None:
    sections, notes = result(DOCKER_COMPOSE)
    assert sections["Host"] == {"pass-env": ["HUGGING_FACE_HUB_TOKEN"]}
    assert sections["Vllm"]["command"].startswith("vllm serve {model} --host")
    assert sections["Vllm"]["ServiceArgs"]["resources"] == {"gpu": 2}
    assert "NOWHERE" in notes["10: services.lost"]
    assert "starts no server" in notes["13: services.webui"]
    assert notes["6: services.vllm.volumes.0"] == "this host's own cache of models is used"
    assert notes["6: services.vllm.volumes.1"] == "the command names /srv/models instead of /models"
    assert notes["6: services.vllm.volumes.2"].startswith("no volume is mounted")
    assert sections["Vllm"]["model"] == "/srv/models/Mistral-7B-v0.1"
    assert "--chat-template /srv/models/t.jinja" in sections["Vllm"]["command"]


def test_a_scripts_servers_are_joined_and_its_other_commands_named() -> None:
    sections, notes = result(SCRIPT)
    assert sections["Frontend"] == {"port": 8100}
    assert sections["Vllm"]["ServiceArgs"] == {
        "workers": 2,
        "resources": {"gpu": 1},
        "start-deadline-s": 1800,
        "envs": {"VLLM_LOGGING_LEVEL": "DEBUG"},
    }
    assert sections["Sglang"]["ServiceArgs"]["resources"] == {"gpu": 2}
    assert sections["Vllm2"]["model"] == "/srv/z"
    assert "s3cret" not in json.dumps(sections) + json.dumps(notes)
    assert "loop" in notes["11: vllm serve x --port 900$i"]
    assert "several hosts" in notes["13: vllm serve y"]
    assert {"2: source venv/bin/activate", "14: cat"} <= notes.keys()
    assert "no" not in [section.get("model") for section in sections.values()]


@pytest.mark.parametrize("text", [LLAMA_SWAP, PROCESS_COMPOSE, DOCKER_COMPOSE, SCRIPT])
def test_serve_takes_what_import_writes(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f").write_text(text)
    for words in (["import", "f", "-o", "g.yaml"], ["serve", "-f", "g.yaml", "--gpus", "sim:16", "--dry-run"]):
        monkeypatch.setattr("sys.argv", ["dynamo", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == EXIT_OK, capsys.readouterr().err
    assert set(yaml.safe_load(Path("g.yaml").read_text())) >= {"Frontend"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\n", "its kind is not recognised"),
        ("models: [", "not YAML"),
        ("models: 5\n", "line 1: models must hold keys and values"),
        ("services:\n  a: 5\n", "line 2: services.a must hold keys and values"),
        ("models: {a: {cmd: '" + "[" * 9 + "'}}", "no part of it can run"),
        ("#!/bin/sh\necho 'x\n", "line 2: a ' is not closed"),
        ("#!/bin/sh\nls\n", "no part of it can run"),
        ("models: " + "[" * 100_000, "nested more than 50 deep"),
        ("#!/bin/sh\n" + "$(" * 50_000, "is not closed"),
        ("#!/bin/bash\nfor ((i=0;", "line 2: (( is not closed"),
        (None, "cannot read f: No such file"),
    ],
)
def test_what_cannot_be_imported_says_why_without_a_traceback(
    text: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("f").write_text(text)
    monkeypatch.setattr("sys.argv", ["dynamo", "import", "f"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_BAD_INPUT
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a 'b c' \"d $X\" e\\ f", ("a", "b c", "d 1", "e f")),
        ("a ${Y:-2} '$X' # c", ("a", "2", "$X")),
        ("env A=b nohup a", ("a",)),
        ("a 2>&1 >log <in", ("a",)),
        ("a && b", None),
        ("a | b", None),
        ("(a)", None),
    ],
)
def test_a_simple_command_is_split_as_a_shell_would(line: str, words: tuple[str, ...] | None) -> None:
    found = single(line, {"X": "1"})
    assert (None if found is None else found.words) == words


def test_a_program_behind_other_words_is_no_server() -> None:
    assert program_of(["echo", "vllm", "serve"]) is None
    assert program_of(["uv", "run", "vllm", "serve", "x"]) is not None
    with pytest.raises(ConfigError, match="more than 5,000 commands"):
        list(commands("a;" * 6_000))
    with pytest.raises(NotCarried):
        imported("vllm serve x --headless", "f", "shell script", {})


def _mutated(value: Any, other: Any) -> Iterator[Any]:
    """The value with each of its parts in turn replaced by another."""
    yield other
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: changed} for changed in _mutated(item, other))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from ([*value[:index], changed, *value[index + 1 :]] for changed in _mutated(item, other))


@pytest.mark.parametrize("other", [5, "x", "${", None, [], [5], {}, {"a": 5}, True], ids=repr)
@pytest.mark.parametrize("text", [LLAMA_SWAP, PROCESS_COMPOSE, DOCKER_COMPOSE], ids=["swap", "process", "docker"])
def test_a_value_of_another_kind_is_never_a_traceback(text: str, other: Any) -> None:
    kind = kind_of(text, "f")
    for changed in _mutated(yaml.safe_load(text), other):
        with contextlib.suppress(ConfigError, NotCarried):
            imported(yaml.safe_dump(changed), "f", kind, {})
