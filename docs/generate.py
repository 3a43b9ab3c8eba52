"""Write the generated parts of the pages, between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.

python docs/generate.py          rewrites the pages
python docs/generate.py --check  exit code 1, and the names, if a part is not current (tests/docs does the same)
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table. A `|` inside a cell is escaped."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# --- options -----------------------------------------------------------------------------------


def options(model: type[BaseModel], *, beyond: type[BaseModel] = BaseModel) -> str:
    """A section's keys as one writes them in YAML, with type, default and meaning; without those of `beyond`."""
    rows = []
    for name, field in model.model_fields.items():
        if name in beyond.model_fields:
            continue
        rows.append((f"`{name.replace('_', '-')}`", _type(field), _default(field), field.description or ""))
    return table(("Key", "Type", "Default", "Meaning"), rows)


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {value:g}"
        for limit in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (value := getattr(limit, attribute, None)) is not None
    ]
    return " ".join([_annotation(field.annotation), *bounds])


def _annotation(annotation: Any) -> str:
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation(member) for member in typing.get_args(annotation) if member is not type(None))
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    return "mapping" if origin is dict else names.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _section(name: str) -> Callable[[], str]:
    def render() -> str:
        import dynamo_local.components

        return options(getattr(dynamo_local.components, name).config_model)

    return render


def planner_options() -> str:
    """The section `Planner`."""
    from dynamo_local.config import PlannerConfig

    return options(PlannerConfig)


def http_options() -> str:
    """Keys of a section with `runtime: http` beyond those of every command."""
    from dynamo_local.runtimes.config import CommandConfig
    from dynamo_local.runtimes.http import HttpConfig

    return options(HttpConfig, beyond=CommandConfig)


def http_frontend_options() -> str:
    """Options of the Frontend before HTTP servers beyond those of the other one."""
    from dynamo_local.components.openai.settings import FrontendConfig
    from dynamo_local.components.proxy.settings import HttpFrontendConfig

    return options(HttpFrontendConfig, beyond=FrontendConfig)


# --- the other parts ---------------------------------------------------------------------------


def commands() -> str:
    """The commands of `dynamo`, as `dynamo --help` lists them."""
    from dynamo_local.cli.main import COMMANDS

    return table(("Command", ""), ((f"`dynamo {name}`", text) for name, (_, text) in COMMANDS.items()))


def lifecycle() -> str:
    """The transition table as a mermaid diagram."""
    from dynamo_local.core.lifecycle import mermaid

    return f"```mermaid\n{mermaid()}```"


def allowed_environment() -> str:
    """The allow-list of a worker's environment."""
    from dynamo_local.core.secrets import ALLOWED_ENV

    return ", ".join(f"`{pattern}`" for pattern in ALLOWED_ENV) + "."


def refused_commands() -> str:
    """circus's commands that the arbiter refuses."""
    from dynamo_local.circus_plugins.stock import REFUSED

    rows = ((f"`{name}`", why, instead.replace("{name}", "NAME")) for name, (why, instead) in REFUSED.items())
    return table(("`circusctl` command", "Refused, because", "Instead"), rows)


def metrics() -> str:
    """The Frontend's metrics, from its registry."""
    from dynamo_local.components.http_metrics import HttpMetrics

    return metric_table(HttpMetrics())


def arbiter_metrics() -> str:
    """The arbiter's metrics, from its registry."""
    from dynamo_local.serve.metrics import ArbiterMetrics
    from dynamo_local.serve.planner_views import PlannerMetrics

    arbiter = ArbiterMetrics()
    return metric_table(arbiter, PlannerMetrics(arbiter.registry))


def metric_table(*owners: Any) -> str:
    """All families of the owners' registry; labels are the family's, or its metric's among an owner's attributes."""
    metrics = [metric for owner in owners for metric in vars(owner).values() if hasattr(metric, "_labelnames")]
    declared = {metric._name: metric._labelnames for metric in metrics}
    rows = []
    for family in owners[0].registry.collect():
        labels = getattr(family, "_labelnames", None) or declared.get(family.name, ())
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append((f"`{name}`", family.type, ", ".join(labels) or "–", family.documentation))
    return table(("Metric", "Type", "Labels", "Meaning"), rows)


def http_errors() -> str:
    """The table in the docstring of `components.openai.errors`."""
    from dynamo_local.components.openai import errors

    lines = (errors.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def parameters() -> str:
    """What each endpoint takes, ignores and refuses."""
    from dynamo_local.components.openai import params, requests

    chat = set(requests.ChatRequest.__struct_fields__)
    completion = set(requests.CompletionRequest.__struct_fields__)
    refused_chat, refused_completion = set(params.UNSUPPORTED_CHAT), set(params.UNSUPPORTED_COMPLETION)
    rows = (
        ("Taken by both", _names(chat & completion)),
        ("Taken by `/v1/chat/completions`", _names(chat - completion)),
        ("Taken by `/v1/completions`", _names(completion - chat)),
        ("Accepted and ignored", _names(params.IGNORED)),
        ("Refused by both, unless neutral", _names(refused_chat & refused_completion)),
        ("Refused by `/v1/chat/completions`", _names(refused_chat - refused_completion)),
        ("Refused by `/v1/completions`", _names(refused_completion - refused_chat)),
    )
    return table(("", "Parameters"), rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


PARTS: Mapping[str, Callable[[], str]] = {
    "allowed-environment": allowed_environment,
    "arbiter-metrics": arbiter_metrics,
    "commands": commands,
    "frontend-options": _section("Frontend"),
    "http-errors": http_errors,
    "http-frontend-options": http_frontend_options,
    "http-options": http_options,
    "lifecycle": lifecycle,
    "metrics": metrics,
    "parameters": parameters,
    "planner-options": planner_options,
    "prefill-worker-options": _section("PrefillWorker"),
    "processor-options": _section("Processor"),
    "refused-commands": refused_commands,
    "router-options": _section("Router"),
    "vllm-worker-options": _section("VllmWorker"),
}


# --- pages -------------------------------------------------------------------------------------


def pages() -> Iterator[Path]:
    """Pages that may hold generated parts."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def parts_of(page: Path) -> dict[str, str]:
    """Generated parts of the page as they stand there, by name."""
    return {match["name"]: match[0] for match in PART.finditer(page.read_text(encoding="utf-8"))}


def render(name: str) -> str:
    """The part as it should be, markers included. KeyError for a name that nobody makes."""
    return f"<!-- generated: {name} -->\n{PARTS[name]().rstrip()}\n<!-- end of {name} -->"


def main() -> int:
    """Rewrite all pages, or with --check only compare them."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a part is not current")
    check = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = PART.sub(lambda match: render(match["name"]), text)
        if new != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    if stale:
        sys.stdout.write(("not current: " if check else "written: ") + ", ".join(stale) + "\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
