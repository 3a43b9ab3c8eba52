"""The examples in the pages work as they stand: graphs, configurations, the README's two commands, the systemd unit."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynamo_local.cli.serve import serve
from dynamo_local.cli.serve_models import ModelWords, decide
from dynamo_local.cli.simulate import simulate
from dynamo_local.components.commands.graph import is_command, with_commands
from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.config.models import target_of
from dynamo_local.core.fleet.states import STAGES
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_BUSY
from dynamo_local.sdk.loader import load_graph
from dynamo_local.simulator.trace import read_trace
from tests.tools.clean_imports import clean_imports
from tests.tools.pages import ROOT, SHELL, blocks, pages, shell_commands

EXAMPLE = ROOT / "examples" / "llm"
README = blocks(ROOT / "README.md")
INSTALL, TESTS = (
    next(b for b in README if b.text.startswith(start)) for start in ("pip install '.", "pip install tox")
)
HELLO = next(b for b in README if b.language == "python")


@pytest.fixture(autouse=True)
def _clean_imports():
    """A graph that one test imports is not the next one's: others have a `graphs.disagg` of their own."""
    with clean_imports():
        yield


def _blocks(language: str) -> list:
    return [pytest.param(b, id=str(b)) for page in pages() for b in blocks(page) if b.language == language]


@pytest.mark.parametrize("block", _blocks("python"))
def test_python_is_python(block):
    ast.parse(block.text)


@pytest.mark.parametrize(
    ("page", "root", "services"),
    [("README.md", "Caller", ["Caller", "Greeter"]), ("docs/sdk.md", "Gate", ["Gate", "Scorer"])],
)
def test_graph_of_a_page_loads(page, root, services, tmp_path):
    (text,) = (b.text for b in blocks(ROOT / page) if b.language == "python" and "@service" in b.text)
    module = f"graph_of_{Path(page).stem.lower()}"
    (tmp_path / f"{module}.py").write_text(text)
    assert list(load_graph(f"{module}:{root}", base_dir=tmp_path).services) == services


def _simulations() -> list:
    commands = (
        words[2:]
        for page in pages()
        for block in blocks(page)
        if block.language in SHELL
        for words in shell_commands(block.text)
        if words[:2] == ["dynamo", "simulate"] and "--generate" in words
    )
    return [pytest.param(words, id=" ".join(words)) for words in commands]


@pytest.mark.parametrize("words", _simulations())
def test_generated_load_of_a_page_runs(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(simulate, [*words, "--limit", "40", "--jobs", "1"]).exit_code == 0
    assert all(len(read_trace(kept)) == 40 for kept in tmp_path.iterdir())


def test_pages_show_generated_loads():
    """Else the test above would run nothing."""
    words = [word for param in _simulations() for word in param.values[0]]
    assert {"-o", "--generate"} <= set(words)
    assert {word.partition(",")[0] for word in words} >= {"chat", "code", "sin"}


@pytest.mark.parametrize("block", _blocks("yaml"))
def test_configuration_of_a_page_is_accepted(block, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(block.text)
    config = load_config(file, env={})
    commands = any(is_command(config.service(name)) for name in config.sections)  # such a file is a graph by itself
    target = target_of(list(config.models)) if config.models else "graphs.disagg:Frontend"
    graph = with_commands(None if commands else load_graph(target, base_dir=EXAMPLE), config, file)
    assert resolve(graph, config, namespace=None).namespace == "dynamo"


def test_first_command_of_the_readme_names_what_is_there():
    """Its extra and its client exist, and it serves the model that the client asks for, on simulated GPUs."""
    install, up, client = shell_commands(INSTALL.text)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert install[2] == ".[embedded]"
    assert "embedded" in setup["options.extras_require"]
    assert (ROOT / client[1]).is_file()
    assert up == ["dynamo", "serve", "--model", "sim-tiny", "--detach"]
    served = decide(ModelWords(models=("sim-tiny",)), {})
    assert served.plan.host_gpus == "sim:8"
    assert [(one.name, one.engines) for one in served.plan.models] == [("sim-tiny", 2)]


def test_second_command_of_the_readme_runs_every_check():
    assert list(shell_commands(TESTS.text)) == [["pip", "install", "tox"], ["tox"]]
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    labels = dict(line.split(" = ") for line in tox["tox"]["labels"].strip().splitlines())
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for heading, listed in (("`tox`", tox["tox"]["env_list"]), ("`tox -m full`", labels["full"])):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {heading} |"))
        table = page[page.index(row) :].split("\n\n")[0]
        for name in re.split(r"[,\s]+", listed.strip()):
            assert f"| `{name}` |" in table, f"{name} is not below {heading} in CONTRIBUTING.md"


@pytest.mark.infra
def test_graph_of_the_readme_says_hello(tmp_path):
    (tmp_path / "hello.py").write_text(HELLO.text)
    (tmp_path / "run").mkdir(mode=0o700)
    env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    env = {name: value for name, value in env.items() if not name.startswith(("DYN_", "ETCD_", "NATS_"))}

    def dynamo(*words: str) -> str:
        command = [sys.executable, "-m", "dynamo_local.cli.main", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=40)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        dynamo("serve", "hello:Caller", "--detach")
        deadline_s = time.monotonic() + 30
        while "hello you" not in dynamo("logs", "Caller"):
            assert time.monotonic() < deadline_s, dynamo("logs")
            time.sleep(0.05)
    finally:
        dynamo("down", "--timeout", "20")


# --- systemd -----------------------------------------------------------------------------------

UNIT = ROOT / "docs" / "dynamo.service"


def _unit() -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    return unit


def test_unit_lets_a_drain_finish():
    service = _unit()["Service"]
    words = service["ExecStart"].split()
    deadline_s = {name: float(words[words.index(f"--{name}-deadline") + 1]) for name in ("start", "drain")}
    assert (service["Type"], service["NotifyAccess"], service["KillMode"]) == ("notify", "main", "mixed")
    assert float(service["TimeoutStopSec"]) > len(STAGES) * deadline_s["drain"]
    assert float(service["TimeoutStartSec"]) > deadline_s["start"]


def test_unit_runs_a_command_that_exists():
    """Its words parse, and what it does not restart on are the codes of bad input and of a taken namespace."""
    service = _unit()["Service"]
    words = service["ExecStart"].split()
    context = serve.make_context("serve", words[2:])
    assert words[1] == "serve"
    assert not context.params["overrides"]
    assert not context.params["detach"]
    assert all((EXAMPLE / file).is_file() for file in context.params["files"])
    assert service["WorkingDirectory"].endswith("/examples/llm")
    assert service["RestartPreventExitStatus"] == f"{EXIT_BAD_INPUT} {EXIT_BUSY}"


def test_unit_is_explained_in_the_operations_page():
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)=([^`]+)`", page, re.MULTILINE))
    service = _unit()["Service"]
    assert told == {name: service[name] for name in told}
    assert {"Type", "KillMode", "TimeoutStopSec"} <= told.keys()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
def test_systemd_accepts_the_unit(tmp_path):
    text = UNIT.read_text(encoding="utf-8")
    text = re.sub(r"ExecStart=\S+", f"ExecStart={sys.executable}", text)
    text = re.sub(r"WorkingDirectory=\S+", f"WorkingDirectory={tmp_path}", text)
    unit = tmp_path / "dynamo.service"
    unit.write_text(text)
    (tmp_path / "run").mkdir(mode=0o700)
    env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)], env=env, capture_output=True, text=True, timeout=30
    )
    complaints = [line for line in done.stderr.splitlines() if "dynamo.service" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


# --- container ---------------------------------------------------------------------------------

CONTAINERFILE = ROOT / "Containerfile"


def test_hadolint_has_nothing_to_say_about_the_containerfile():
    done = subprocess.run(["hadolint", str(CONTAINERFILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_image_serves_by_words_that_the_command_knows():
    (command,) = re.findall(r"^CMD (\[.*\])$", CONTAINERFILE.read_text(), re.MULTILINE)
    words = json.loads(command)
    context = serve.make_context("serve", words[1:])
    assert words[0] == "serve"
    assert context.params["models"] == ("sim-tiny",)


def test_the_image_gets_all_that_the_package_is_made_of():
    kept = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    packaged = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} - {"tests", "benchmarks"}
    assert packaged | {"setup.cfg", "pyproject.toml", "README.md", "LICENSE"} == kept
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_image_is_built_where_a_builder_is_there():
    builders = (["podman", "build"], ["buildah", "build"], ["docker", "build"])
    there = [
        words for words in builders if shutil.which(words[0]) and subprocess.run([words[0], "info"]).returncode == 0
    ]
    if not there:
        pytest.skip("no podman, no buildah, and no Docker daemon on this machine")
    subprocess.run([*there[0], "-f", str(CONTAINERFILE), "-t", "dynamo-local-test", str(ROOT)], check=True, timeout=800)


def test_no_page_and_no_message_installs_the_package_by_name() -> None:
    code = [path for room in ("dynamo_local", "state", "circus_plugins") for path in (ROOT / room).rglob("*.py")]
    by_name = re.compile(r"(pip|uv|pipx) [^\n`]*install[^\n`]*['\" ]dynamo[-_]local\b")
    assert [path for path in (*pages(), *code) if by_name.search(path.read_text())] == []
