"""`dynamo serve GRAPH`, or `--model PATH`: in the foreground, detached, or as a dry run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import SECONDS, FiniteRange
from dynamo_local.errors import EXIT_FAILED, BadInput, DynamoError
from dynamo_local.system import collector
from dynamo_local.system.host_errors import host_refused

if TYPE_CHECKING:
    from dynamo_local.arbiter.deployment import Deployment
    from dynamo_local.cli.serve_models import Served
    from dynamo_local.system.process_host import ExitCallback, SupervisedHost

POLL_S = 0.02
MILLISECONDS = FiniteRange(min=0, min_open=True, max=1e9)


BEHIND = "dynamo_local.behind"
"""Key of the click context's `meta`: the words after `--`."""
PAGE = "--dashboard"
ANY_PORT = "0"


class _ServeCommand(click.Command):
    """Keeps the words after `--` apart: they are the engine's, or a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, behind = _parted(args)
        ctx.meta[BEHIND] = tuple(behind)
        return super().parse_args(ctx, list(_with_port(own)))


def _with_port(words: list[str]) -> Iterator[str]:
    """`--dashboard` without a port takes any free one. The word after it is then another option, or the graph."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        alone = word == PAGE and not following.isdecimal()
        yield f"{PAGE}={ANY_PORT}" if alone else word


def _parted(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first `--`, and those after it."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


@click.command(cls=_ServeCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.argument("target", metavar="[MODULE:SERVICE]", required=False)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PATH",
    help="Serve this model: a folder, or a name of the hub's cache. Several times: several models.",
)
@click.option(
    "--engine", metavar="NAME", help="With --model: vllm, sim, sglang, or a command with {model} and {port:http}."
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    help="With --model: tokens of the longest request, prompt and answer.  [the model's]",
)
@click.option("--port", type=click.IntRange(0, 65535), help="With --model: TCP port of the API; 0: any.  [8000]")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --model: keys of which a client must show one, one a line.",
)
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    metavar="NAME",
    help="With --model: its name in the API; once for each model.",
)
@click.option(
    "--write",
    "write_to",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --model: keep the plan as YAML with comments.",
)
@click.option(
    "--file",
    "-f",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Configuration, YAML. Given again, it is laid over the files before.",
)
@click.option("--namespace", "-n", default=None, help="Replaces the graph's own namespace.")
@click.option("--gpus", default=None, help="`0,2,3`, UUIDs, or `sim:8` for eight simulated devices.")
@click.option("--start-deadline", "start_deadline_s", type=SECONDS, default=300.0, help="Seconds for a worker.  [300]")
@click.option("--drain-deadline", "drain_deadline_s", type=SECONDS, default=600.0, help="Seconds for a worker.  [600]")
@click.option("--pass-env", multiple=True, metavar="NAME", help="One more variable (or pattern) for the workers.")
@click.option(
    "--on-arbiter-death",
    type=click.Choice(["end", "keep"]),
    default=None,
    help="If this process is killed: end the workers (the default), or keep them serving for --adopt.",
)
@click.option(
    "--planner/--no-planner",
    default=None,
    help="Scale the graph by its load, or not. Default: on if the configuration has a `Planner` section.",
)
@click.option(
    "--follow",
    type=click.Choice(["virtual"]),
    default=None,
    help="Carry out the decisions of another planner (Dynamo's, with `environment: virtual`), which stand in etcd.",
)
@click.option(
    "--follow-keys",
    type=click.Choice(["v1", "v0"]),
    default=None,
    help="Where these stand: v1/NAMESPACE/planner/ (v1, the default), or /NAMESPACE/planner/ (Dynamo up to 0.5).",
)
@click.option("--ttft", "ttft_ms", type=MILLISECONDS, help="Target for the time to first token, ms, of everything.")
@click.option("--itl", "itl_ms", type=MILLISECONDS, help="Target for a request's mean gap of tokens, ms.")
@click.option("--insecure", is_flag=True, help="Let a Frontend listen beyond this machine although it has no api-key.")
@click.option(
    PAGE,
    "page",
    type=click.IntRange(0, 65535),
    metavar="[PORT]",
    help="Serve the page, too (docs/dashboard.md).  [any]",
)
@click.option("--adopt", is_flag=True, help="Take back the running workers of a killed `dynamo serve`.")
@click.option("--replace", is_flag=True, help="End what a killed `dynamo serve` left running at once, and start anew.")
@click.option("--detach", "-d", is_flag=True, help="Return when everything is ready, or has failed.")
@click.option("--dry-run", is_flag=True, help="Print what would start, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: JSON.")
@click.option("--boot-report", type=click.Path(path_type=Path), hidden=True)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def serve(
    target: str | None,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    boot_report: Path | None,
    write_to: Path | None,
    **words: Any,
) -> int:
    """Run the graph MODULE:SERVICE of the current folder, a model (--model), or a command (after --) on this host.

    The graph can be left out where the configuration's sections are commands (docs/dynamo-1x.md). Any
    `--Service.key=value` overrides the configuration, e.g. `--VllmWorker.ServiceArgs.workers=2`. With --model, words
    after -- go to the engine as `vllm serve` takes them (docs/serve-model.md).
    """
    if detach and boot_report is None:
        return _detach()
    with collector.keeping():
        from dynamo_local.arbiter.launch import plan_deployment
        from dynamo_local.arbiter.launch import serve as run
        from dynamo_local.arbiter.request import ServeOptions, understand

    page = words.pop("page")
    if page is not None:
        words["overrides"] = (*words["overrides"], f"--Host.dashboard={page}")
    target, served, words = _planned(target, words)
    files = words.pop("files")
    options = ServeOptions(target=target, file=files[0] if files else None, more_files=files[1:], **words)
    if write_to is not None and served is None:
        raise BadInput("--write keeps the plan for --model: name a model")
    if write_to is not None and served is not None:
        _write(served, write_to)
    if served is not None and served.missing and not dry_run:
        raise BadInput(served.missing[0])
    if dry_run:
        request = understand(options, os.environ, Path.cwd(), only_plan=True)
        for note in (*(() if served is None else served.missing), *request.notes):
            click.echo(f"dynamo: {note}", err=True)
        if served is not None:
            _print_served(served, as_json)
            return 0
        deployment, _pool = plan_deployment(request, os.environ)
        _print_plan(deployment.describe(), as_json)
        return 0
    if boot_report is None:
        return run(options, own_arbiter)
    return _run_detached(options, boot_report)


OF_MODELS = ("models", "engine", "max_model_len", "port", "api_key_file", "names")
"""Options that are about models."""


def _planned(target: str | None, words: dict[str, Any]) -> tuple[str | None, Served | None, dict[str, Any]]:
    """The graph, the plan for models (None: there are none), and the words as `ServeOptions` takes them."""
    behind = click.get_current_context().meta[BEHIND]
    overrides = tuple(words["overrides"])
    if target is not None and target.startswith("-"):  # no graph was given: this is the first override
        target, overrides = None, (target, *overrides)
    own = {name: words.pop(name) for name in OF_MODELS}
    command = not own["models"] and target is None and bool(behind) and not behind[0].startswith("-")
    if not own["models"] and not command:
        given = [name for name, value in own.items() if value not in (None, ())]
        if given:
            option = {"names": "served-model-name"}.get(given[0], given[0]).replace("_", "-")
            raise BadInput(f"--{option} is about --model PATH: give one, or set it in the configuration")
        return target, None, {**words, "overrides": (*overrides, *behind)}
    if target is not None:
        raise BadInput(f"{target} and --model are two graphs: say one of the two")
    if os.environ.get("DYN_DEPLOYMENT_CONFIG", "").strip():
        raise BadInput("DYN_DEPLOYMENT_CONFIG is a configuration of its own: unset it, or leave --model out")
    from dynamo_local.cli.serve_models import ModelWords, decide

    shared = {name: words[name] for name in ("gpus", "ttft_ms", "itl_ms", "namespace", "adopt")}
    served = decide(ModelWords(behind=behind, **own, **shared), os.environ)
    words = {
        **words,
        "overrides": overrides,
        "base": served.yaml,
        "reasons": served.plan.reasons,
        "ttft_ms": None,
        "itl_ms": None,
    }
    if served.plan.host_gpus is not None:
        words["gpus"] = served.plan.host_gpus
    return served.plan.target, served, words


def _write(served: Served, path: Path) -> None:
    from dynamo_local.config.model_graph import graph_yaml

    try:
        path.write_text(graph_yaml(served.plan, str(path)), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None


def _print_served(served: Served, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(served.as_json(), indent=2))
        return
    for line in served.plan.reasons:
        click.echo(line)


def own_arbiter(deployment: Deployment, supervisor: Any, on_exit: ExitCallback) -> SupervisedHost:
    """The arbiter of `dynamo serve`: this process itself."""
    from dynamo_local.circus_plugins.arbiter import DynamoArbiter  # imports circus, which only `serve` needs

    paths = deployment.paths
    return DynamoArbiter(
        endpoint=paths.circus_endpoint,
        pubsub_endpoint=f"ipc://{paths.events_socket}",
        supervisor=supervisor,
        on_exit=on_exit,
    )


def _print_plan(plan: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(plan, indent=2, default=str))
        return
    import yaml

    click.echo(yaml.safe_dump(json.loads(json.dumps(plan, default=str)), sort_keys=False).rstrip())


def _run_detached(options: Any, boot_report: Path) -> int:
    """The child's side of --detach: whatever goes wrong is told in the boot report."""
    from dynamo_local.arbiter.launch import serve as run

    try:
        return run(options, own_arbiter, boot_report=boot_report)
    except Exception as error:
        failure = error if isinstance(error, DynamoError) else host_refused(error)
        if failure is None:
            raise
        with boot_report.open("a") as file:
            file.write(json.dumps({"kind": "failed", "message": str(failure), "exit_code": failure.exit_code}) + "\n")
        return failure.exit_code


def _detach() -> int:
    """The parent's side: start the same command in a session of its own and follow its boot report.

    The child has the same words, because -d may stand within another (`-dn NAME`). The report's option tells it that
    it is the child. Report and output are in memory: a full disk is a failure that must be told, too.
    """
    own, behind = _parted(sys.argv[1:])
    report, output = os.memfd_create("boot-report"), os.memfd_create("output")
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "dynamo_local.cli.main", *own, f"--boot-report={_file_of(report)}", "--", *behind],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            close_fds=True,
            pass_fds=(report,),
        )
        with _passed_on(child):
            return _follow(child, _file_of(report), _file_of(output))
    finally:
        os.close(report)
        os.close(output)


def _file_of(descriptor: int) -> Path:
    """Opened by this, it has an offset of its own; in a child that inherited the descriptor, too."""
    return Path(f"/proc/self/fd/{descriptor}")


@contextmanager
def _passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM go to the child, which then aborts its start."""

    def pass_on(signum: int, _frame: Any) -> None:
        child.send_signal(signum)

    before = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _follow(child: subprocess.Popen[bytes], report: Path, output: Path) -> int:
    printed: dict[str, str] = {}
    failure: dict[str, Any] | None = None
    with report.open() as file:
        while True:
            ended = child.poll() is not None
            for record in _records(file):
                if record["kind"] == "ready":
                    facts = record["facts"]
                    click.echo(
                        f"ready: {facts.get('frontend_url') or facts['namespace']} (in {facts['seconds']:.1f} s)"
                    )
                    child.returncode = 0  # keeps Popen from warning about a child that is meant to outlive us
                    return 0
                if record["kind"] == "failed":
                    failure = record
                _tell(record, printed)
            if ended:
                break
            time.sleep(POLL_S)
    if failure is not None:
        click.echo(f"dynamo: {failure['message']}", err=True)
        return int(failure["exit_code"])
    code = child.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    click.echo(f"dynamo: the arbiter {how} before it was ready\n{output.read_text()}".rstrip(), err=True)
    return code if code > 0 else EXIT_FAILED


def _records(file: Any) -> Iterator[dict[str, Any]]:
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return
        yield json.loads(line)


def _tell(record: dict[str, Any], printed: dict[str, str]) -> None:
    if record["kind"] == "event":
        click.echo(record["text"])
    for row in record.get("rows", ()):
        if printed.get(row["name"]) != row["state"]:
            printed[row["name"]] = row["state"]
            click.echo(f"{row['name']}: {row['state']}" + (f" on GPU {row['gpus']}" if row["gpus"] else ""))
