"""The plugin's section of an ini becomes the options of `dynamo serve`."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamo_local.circus_plugins.circusd_plugin import DynamoPlugin, deployment_options
from dynamo_local.errors import BadInput, ConfigError

YAML = "Host:\n  gpus: sim:2\n  circusd:\n    graph: graphs.disagg:Frontend\n"


def _file(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def test_the_yaml_says_what_the_command_line_would(tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    more = "    working-dir: llm\n    namespace: prod\n    drain_deadline_s: 30\n"
    options, folder = deployment_options(_file(tmp_path, YAML + more), {})
    assert folder == tmp_path / "llm"
    assert options.target == "graphs.disagg:Frontend"
    assert options.file == tmp_path / "deployment.yaml"
    assert (options.namespace, options.drain_deadline_s, options.start_deadline_s) == ("prod", 30.0, 300.0)
    assert (options.on_arbiter_death, options.adopt) == ("keep", True)


def test_the_folder_is_the_yamls_own_by_default(tmp_path: Path) -> None:
    """Whatever circusd's current folder is."""
    assert deployment_options(_file(tmp_path, YAML), {})[1] == tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Host: {gpus: 'sim:2'}\n", "does not say which graph"),
        ("Host: {circusd: {namespace: prod}}\n", "graph"),
        (YAML + "    working-dir: nowhere\n", "there is no folder"),
        (YAML + "    workingdir: llm\n", "workingdir"),
    ],
)
def test_a_deployment_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises((BadInput, ConfigError), match=said):
        deployment_options(_file(tmp_path, text), {})


@pytest.mark.parametrize(
    ("ssh", "config", "said"),
    [(None, {}, "needs `deployment = "), ("host", {"deployment": "x.yaml"}, "another host")],
)
def test_a_section_that_cannot_be_used_is_refused(ssh: str | None, config: dict[str, str], said: str) -> None:

    def serve() -> None:
        DynamoPlugin("ipc://c", "ipc://p", 1.0, ssh, name="plugin:llm", **config)._serve()

    # circus makes its loop the thread's current one: not of this thread, which has pytest's.
    with ThreadPoolExecutor(1) as thread, pytest.raises(BadInput, match=said):
        thread.submit(serve).result(10)


def test_circusd_itself_imports_nothing_heavy() -> None:
    """circusd resolves the plugin's name in its own process, and forks from it: no gRPC, no NATS, no pydantic there."""
    code = (
        "import sys, dynamo_local.circus_plugins.circusd_plugin\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'grpc', 'nats', 'aetcd', 'pydantic', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
