"""`dynamo bench`: load on the graph that runs, and the figures of `vllm bench serve`."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import (
    FiniteRange,
    ask_arbiter,
    find_paths,
    json_option,
    namespace_option,
    progress_bar,
)
from dynamo_local.components.text.model import TINY_FOLDER, TINY_MODEL
from dynamo_local.errors import EXIT_FAILED, EXIT_OK, BadInput, DynamoError, NotRunning

if TYPE_CHECKING:
    from dynamo_local.measuring.bench import Load, Sent

KEY_ENV = "OPENAI_API_KEY"
MODELS_TIMEOUT_S = 10.0
LENGTH = click.IntRange(1, 1_000_000)


@dataclass(frozen=True, slots=True)
class Bench:
    """The server and the load, as the command line says. `rate` None: as fast as `concurrency` lets.

    `tokenizer`: a folder, or a name that the tools look up.
    """

    url: str
    model: str
    tokenizer: str
    key: str | None
    requests: int
    rate: float | None
    concurrency: int | None
    isl: int
    osl: int
    seed: int


@click.command()
@click.option("--with", "tool", type=click.Choice(["own", "vllm", "aiperf"]), default="own", show_default=True)
@click.option("--requests", type=click.IntRange(1, 10_000_000), default=100, show_default=True)
@click.option("--rate", type=FiniteRange(min=0, min_open=True, max=1e6), help="Requests per second.  [all at once]")
@click.option("--concurrency", type=click.IntRange(1, 100_000), help="Requests under way at most.  [no bound]")
@click.option("--isl", type=LENGTH, default=1024, show_default=True, help="Tokens of each prompt.")
@click.option("--osl", type=LENGTH, default=128, show_default=True, help="Tokens of each answer.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="A trace, as for `dynamo simulate`.")
@click.option("--model", help="Its name.  [the first that the Frontend lists]")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path, dir_okay=False), help="File with a key of the Frontend."
)
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
@namespace_option
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORDS OF THE TOOL]")
def bench(
    tool: str,
    trace: Path | None,
    model: str | None,
    api_key_file: Path | None,
    as_json: bool,
    namespace: str | None,
    more: tuple[str, ...],
    **numbers: Any,
) -> int:
    """Send requests to the graph that runs, and show throughput, TTFT, TPOT and ITL.

    --with vllm runs `vllm bench serve`, --with aiperf runs `aiperf profile`; words after -- go to that tool. A key is
    read from --api-key-file or from OPENAI_API_KEY. Exit code 1: a request failed.
    """
    if more and not more[0].startswith("-"):
        raise BadInput(f"{more[0]} is no option: a namespace is -n {more[0]}; a tool's own words begin with an option")
    if more and tool == "own":
        raise BadInput(f"{more[0]} is for another tool: say --with vllm or --with aiperf")
    if trace is not None and tool != "own":
        raise BadInput(f"--trace is for --with own; {tool}'s own words for a trace go after --")
    url = ask_arbiter(find_paths(namespace), "dynamo_status")["graph"]["frontend_url"]
    if url is None:
        raise NotRunning("this graph has no Frontend that is ready; `dynamo status` shows its workers")
    key = _key(api_key_file)
    asked = Bench(url, *_model(url, key, model), key, **numbers)
    if tool == "own":
        found = _own(asked, trace)
    elif as_json and tool == "aiperf":
        raise BadInput("aiperf writes its own JSON (--output-artifact-dir): leave --json out")
    else:
        outcome = _other(tool, asked, more, as_json=as_json)
        if isinstance(outcome, int):
            return outcome
        found = outcome
    from dynamo_local.measuring.bench import table

    click.echo(json.dumps(found) if as_json else "\n".join(table(found)))
    for error in found["errors"]:
        click.echo(f"dynamo: a request failed: {error}", err=True)
    return EXIT_FAILED if found["failed"] else EXIT_OK


def _key(file: Path | None) -> str | None:
    """The first key of the file, else the environment's."""
    if file is None:
        return os.environ.get(KEY_ENV)
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise BadInput(f"{file} has no key")
    return lines[0]


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _model(url: str, key: str | None, wanted: str | None) -> tuple[str, str]:
    """The wanted model, else the first one, and where its tokenizer is. Raises `BadInput` for one that is not served.

    The place is that of `root` in the answer, as vLLM's clients take it.
    """
    import httpx

    try:
        answer = httpx.get(f"{url}/v1/models", headers=_headers(key), timeout=MODELS_TIMEOUT_S)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise BadInput(f"the Frontend wants a key: --api-key-file FILE, or {KEY_ENV}")
        models = answer.raise_for_status().json()["data"]
        roots = {str(each["id"]): str(each.get("root", each["id"])) for each in models}
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise DynamoError(f"{url}/v1/models did not answer as expected: {error}; see `dynamo status`") from None
    if not roots:
        raise NotRunning(f"{url} lists no model yet; `dynamo status` shows its workers")
    if wanted is not None and wanted not in roots:
        raise BadInput(f"no model is named {wanted!r}; there are: {', '.join(roots)}")
    name = wanted or next(iter(roots))
    return name, str(TINY_FOLDER) if roots[name] == TINY_MODEL else roots[name]


def _own(asked: Bench, trace: Path | None) -> dict[str, Any]:
    from dynamo_local.measuring.bench import Load, arrivals, figures

    if trace is not None:
        from dynamo_local.simulator.trace import read_trace

        requests: Sequence[Any] = read_trace(trace, limit=asked.requests)
    else:
        requests = arrivals(asked.requests, asked.rate or math.inf, asked.isl, asked.osl, asked.seed)
    sent = sent_load(asked, Load(requests, asked.concurrency, asked.seed))
    return {"tool": "own", "url": asked.url, "model": asked.model, **figures(sent)}


def sent_load(asked: Bench, load: Load) -> list[Sent]:
    """How each request ended."""
    import httpx
    import uvloop

    from dynamo_local.measuring.bench import Generator
    from dynamo_local.measuring.stream import Server

    tls = httpx.create_ssl_context() if asked.url.startswith("https:") else None
    with progress_bar("requests", len(load.requests)) as advance:
        return uvloop.run(Generator(Server(asked.url, _headers(asked.key), tls), asked.model, advance).run(load))


def command_of(tool: str, asked: Bench, more: Sequence[str]) -> list[str]:
    """The tool's command line. No key stands in it."""
    if tool == "vllm":
        words = {
            "base-url": asked.url,
            "backend": "openai",
            "endpoint": "/v1/completions",
            "model": asked.model,
            "tokenizer": None if "--tokenizer" in more else asked.tokenizer,
            "dataset-name": "random",
            "random-input-len": asked.isl,
            "random-output-len": asked.osl,
            "num-prompts": asked.requests,
            "request-rate": asked.rate or "inf",
            "max-concurrency": asked.concurrency,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "seed": asked.seed,
        }
        begin = ["vllm", "bench", "serve", "--ignore-eos"]
    else:
        words = {
            "url": asked.url,
            "model": asked.model,
            "tokenizer": None if "--tokenizer" in more else asked.tokenizer,
            "endpoint-type": "completions",
            "synthetic-input-tokens-mean": asked.isl,
            "output-tokens-mean": asked.osl,
            "request-count": asked.requests,
            "request-rate": asked.rate,
            "concurrency": asked.concurrency,
            "random-seed": asked.seed,
        }
        begin = ["aiperf", "profile", "--streaming", "--use-server-token-count", "--extra-inputs", "ignore_eos:true"]
    given = [word for name, value in words.items() if value is not None for word in (f"--{name}", str(value))]
    return [*begin, *given, *more]


def _other(tool: str, asked: Bench, more: Sequence[str], *, as_json: bool) -> int | dict[str, Any]:
    """Run the tool. Its exit code; with `as_json` the figures that vLLM wrote."""
    program = shutil.which(tool)
    if program is None:
        raise BadInput(f"{tool} is not on PATH: `pip install {tool}`, or --with own")
    env = {**os.environ, **({} if asked.key is None else {KEY_ENV: asked.key})}
    words = [program, *command_of(tool, asked, more)[1:]]
    if not as_json:
        return subprocess.run(words, env=env, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as folder:
        words += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        code = subprocess.run(words, env=env, stdout=sys.stderr, check=False).returncode
        result = Path(folder, "result.json")
        if code or not result.exists():
            raise DynamoError(f"{tool} ended with exit code {code} and wrote no result. Its output above says why.")
        return figures_of_vllm(json.loads(result.read_text(encoding="utf-8")), asked)


def figures_of_vllm(result: Mapping[str, Any], asked: Bench) -> dict[str, Any]:
    """The same keys as our own figures. Null: this version of vLLM does not write it."""
    from dynamo_local.measuring.bench import LATENCIES, ROWS, STATISTICS

    keys = [*ROWS, *(f"{key}_{name}_ms" for name in LATENCIES for key in STATISTICS)]
    failed = max(0, asked.requests - int(result["completed"]))
    head = {"tool": "vllm", "url": asked.url, "model": asked.model}
    return {**head, **{key: result.get(key) for key in keys}, "failed": failed, "errors": []}
