"""Write the generated parts of the pages, between `<!-- generated: NAME -->` and `<!-- end of NAME -->`, and schemas.

python docs/generate.py          rewrites the pages and docs/schemas
python docs/generate.py --check  exit code 1, and the names, if a part is not current (tests/docs does the same)
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = "schemas"
PART = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def _sibling(name: str) -> types.ModuleType:
    """A module of this folder; docs is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


_tables = _sibling("option_tables")
table, options, type_of = _tables.table, _tables.options, _tables.type_of


# --- options -----------------------------------------------------------------------------------


def generator_keys() -> str:
    """Keys of `dynamo simulate --generate`: the kinds' values, range and meaning."""
    from dynamo_local.simulator.generator import KINDS, GeneratorOptions

    rows = []
    for name, field in GeneratorOptions.model_fields.items():
        default = None if field.is_required() else field.default
        values = (f"{numbers.get(name, default):.12g}" for numbers in KINDS.values())
        meaning = " ".join((field.description or "").split())
        rows.append((f"`{name.replace('_', '-')}`", *values, type_of(field), meaning))
    return table(("Key", *(f"`{kind}`" for kind in KINDS), "May be", "Meaning"), rows)


def _section(name: str, like: str = "") -> Callable[[], str]:
    def render() -> str:
        components = importlib.import_module("dynamo_local.components")
        others = {like: getattr(components, like).config_model} if like else {}
        return options(getattr(components, name).config_model, like=others)

    return render


def planner_options() -> str:
    """The section `Planner`: each option under its names, in a table for the policies that take it."""
    from dynamo_local.config.planner import POLICIES, PlannerConfig, known_names, options_of

    tables: dict[str, list[tuple[str, ...]]] = {}
    for name, field in PlannerConfig.model_fields.items():
        names = [alias for alias, of in known_names().items() if of == name]
        takers = [policy for policy in POLICIES if name in options_of(policy)]
        whose = "All policies" if len(takers) == len(POLICIES) else ", ".join(f"`{policy}`" for policy in takers)
        key = ", ".join(f"`{each.replace('_', '-')}`" for each in names)
        tables.setdefault(whose, []).append(_tables.row_of(name, field, key))
    return "\n\n".join(f"## {whose}\n\n{table(_tables.HEAD, rows)}" for whose, rows in tables.items())


def http_options() -> str:
    """Keys of a section with `runtime: http` beyond those of every command."""
    from dynamo_local.components.commands.config import CommandConfig
    from dynamo_local.components.commands.http_server import HttpConfig

    return options(HttpConfig, beyond=CommandConfig)


def http_frontend_options() -> str:
    """Options of the Frontend before HTTP servers beyond those of the other one."""
    from dynamo_local.components.openai.settings import FrontendConfig
    from dynamo_local.components.proxy.messages import HttpFrontendConfig

    return options(HttpFrontendConfig, beyond=FrontendConfig)


# --- the other parts ---------------------------------------------------------------------------


def commands() -> str:
    """The commands of `dynamo`, as `dynamo --help` lists them."""
    from dynamo_local.cli.main import COMMANDS

    return table(("Command", ""), ((f"`dynamo {name}`", text) for name, (_, text) in COMMANDS.items()))


def doctor_checks() -> str:
    """The ids of `dynamo doctor` by subject, each with its check's docstring."""
    from dynamo_local.core.doctor import SUBJECTS
    from dynamo_local.core.doctor.findings import explanation_of, id_of

    return "\n\n".join(
        f"### {subject}\n\n"
        + table(("Id", "In order if"), ((f"`{id_of(each)}`", explanation_of(each)) for each in checks))
        for subject, checks in SUBJECTS.items()
    )


def lifecycle() -> str:
    """The transition table as a mermaid diagram."""
    from dynamo_local.core.fleet.lifecycle import mermaid

    return f"```mermaid\n{mermaid()}```"


def packages() -> str:
    """The layers from the top to the bottom, as `.importlinter` orders them: each package with its docstring."""
    rows = []
    for layer in _layers():
        modules = {package: importlib.import_module(f"dynamo_local.{package}") for package in layer}
        what = {name: inspect.cleandoc(module.__doc__ or "").split("\n\n")[0] for name, module in modules.items()}
        rows.append(("<br>".join(f"`{name}`: {' '.join(text.split())}" for name, text in what.items()),))
    return table(("Packages of one layer",), rows)


def _layers() -> list[list[str]]:
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    layers = config["importlinter:contract:layers"]["layers"].strip().splitlines()
    return [[package.strip() for package in re.split(r"[|:]", layer)] for layer in layers]


def import_contracts() -> str:
    """The names of all contracts in `.importlinter`."""
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    names = (config[section]["name"] for section in config.sections() if ":contract:" in section)
    return "\n".join(f"* {name}" for name in names)


def navigation() -> str:
    """All pages, as the navigation of the site arranges them, linked from the folder `docs`."""
    website = _sibling("website")
    sources = {name: page for page, name in website.pages().items()}
    groups: dict[str, list[str]] = {}
    for group, title, name in website.navigation():
        link = os.path.relpath(sources[name], ROOT / "docs")
        groups.setdefault(group, []).append(f"- [{title}]({link})")
    return "\n\n".join(f"## {group}\n\n" + "\n".join(links) for group, links in groups.items())


def role_traits() -> str:
    """The traits of each role: the table of `core/fleet/states.py`."""
    from dynamo_local.core.fleet.states import ROLES

    return _traits_table("Role", ROLES)


def state_traits() -> str:
    """The traits of each state: the table of `core/fleet/states.py`."""
    from dynamo_local.core.fleet.states import TRAITS

    return _traits_table("State", TRAITS)


def _traits_table(what: str, traits_of: Mapping[Any, Any]) -> str:
    rows = ((f"`{key}`", ", ".join(_traits(traits))) for key, traits in traits_of.items())
    return table((what, "Traits"), rows)


def _traits(traits: Any) -> Iterator[str]:
    """Each trait that is set, except the colour: its name alone if it is true, else with its value."""
    for field in dataclasses.fields(traits):
        if field.name == "colour":
            continue
        value = getattr(traits, field.name)
        if value is True:
            yield f"`{field.name}`"
        elif value is not None and value is not False:  # 0 is a value
            yield f"`{field.name}={value.value if isinstance(value, enum.Enum) else value}`"


def events() -> str:
    """The events that the machine takes, under the headings of their module."""
    from dynamo_local.core.fleet import events as module
    from dynamo_local.core.fleet.step import HANDLERS

    return _listed(module, {kind.__name__ for kind in HANDLERS})


def effects() -> str:
    """The effects that the machine returns."""
    from dynamo_local.core.fleet import effects as module

    return _listed(module, {kind.__name__ for kind in typing.get_args(module.Effect)})


def _listed(module: types.ModuleType, names: set[str]) -> str:
    """Those classes of the module below its headings, each with the first part of its docstring."""
    tables: dict[str, list[tuple[str, str]]] = {}
    heading = ""
    for line in inspect.getsource(module).splitlines():
        if match := re.fullmatch(r"# --- (.+?) -+", line):
            heading = f"### {match[1][:1].upper()}{match[1][1:]}\n\n"
        if (match := re.match(r"class (\w+)", line)) and match[1] in names:
            meaning = " ".join(inspect.cleandoc(getattr(module, match[1]).__doc__).split("\n\n")[0].split())
            meaning = re.sub(r"(?:: see|\. See) `[\w.]+`(?:, whose refusals `step` raises)?\.", ".", meaning)
            tables.setdefault(heading, []).append((f"`{match[1]}`", meaning))
    return "\n\n".join(heading + table(("", "Meaning"), rows) for heading, rows in tables.items())


def _episode(name: str) -> Callable[[], str]:
    """The machine's steps in an episode of `docs/scenarios.py`, below its docstring. Timers are left out."""

    def render() -> str:
        script = _sibling("scenarios").EPISODES[name]
        summary = " ".join(inspect.cleandoc(script.__doc__).split("\n\n")[0].split())
        more = [" ".join(part.split()) for part in inspect.cleandoc(script.__doc__).split("\n\n")[1:]]
        rows = (
            (
                f"{row.at_s:.2f}",
                row.event,
                "<br>".join(_unrepeated(row.event, line) for line in row.transitions),
                "<br>".join(_unrepeated(row.event, line) for line in row.effects if not line.startswith("wait until ")),
            )
            for row in script().rows
        )
        head = ("s", "Event (cause)", "Transitions (kind, cause)", "Effects")
        return "\n\n".join([summary, *more, table(head, rows)])

    return render


def _unrepeated(event: str, line: str) -> str:
    """A transition or effect without the worker and the cause that its event names already."""
    if match := re.fullmatch(r"`\w+` (\w+)(?: [-+]\d+)? \((.+)\)", event):
        worker, cause = match.groups()
        line = line.removeprefix(f"{worker}: ").removesuffix(f" ({worker})").removesuffix(f" {worker}")
        line = line.replace(f", {cause})", ")")
    return line


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
    from dynamo_local.arbiter.lead_times import LeadTimeMetrics
    from dynamo_local.arbiter.metrics import ArbiterMetrics, DispatchMetrics
    from dynamo_local.arbiter.model_shares import ModelMetrics
    from dynamo_local.arbiter.planner_metrics import PlannerMetrics, PluginMetrics

    arbiter = ArbiterMetrics()
    return metric_table(
        arbiter,
        PlannerMetrics(arbiter.registry),
        PluginMetrics(arbiter.registry),
        LeadTimeMetrics(arbiter.registry),
        ModelMetrics(arbiter.registry),
        DispatchMetrics(arbiter.registry),
    )


def metric_table(*owners: Any) -> str:
    """All families of the owners' registry. Labels are the family's, or its metric's among an owner's attributes."""
    metrics = [metric for owner in owners for metric in vars(owner).values() if hasattr(metric, "_labelnames")]
    declared = {metric._name: metric._labelnames for metric in metrics}
    rows = []
    for family in owners[0].registry.collect():
        labels = ", ".join(getattr(family, "_labelnames", None) or declared.get(family.name, ()))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        meaning = f"{family.documentation} (histogram)" if family.type == "histogram" else family.documentation
        rows.append((f"`{name}{{{labels}}}`" if labels else f"`{name}`", meaning))
    return table(("Metric and its labels", "Meaning"), rows)


def http_errors() -> str:
    """The table in the docstring of `components.openai.errors`."""
    from dynamo_local.components.openai import errors

    lines = (errors.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def parameters() -> str:
    """The parameters that each endpoint takes, ignores and refuses."""
    from dynamo_local.components.openai import requests
    from dynamo_local.components.openai import requests as extras
    from dynamo_local.components.openai import requests as params

    chat = {*requests.ChatRequest.__struct_fields__, *extras.ChatExtras.__struct_fields__}
    completion = {*requests.CompletionRequest.__struct_fields__, *extras.CompletionExtras.__struct_fields__}
    refused_chat, refused_completion = set(params.UNSUPPORTED_CHAT), set(params.UNSUPPORTED_COMPLETION)
    rows = (
        ("Taken by both", _names(chat & completion)),
        ("Taken by `/v1/chat/completions`", _names(chat - completion)),
        ("Taken by `/v1/completions`", _names(completion - chat)),
        ("Accepted and ignored", _names(params.IGNORED - chat)),
        ("Refused by both, unless neutral", _names(refused_chat & refused_completion)),
        ("Refused by `/v1/chat/completions`", _names(refused_chat - refused_completion)),
        ("Refused by `/v1/completions`", _names(refused_completion - refused_chat)),
    )
    return table(("", "Parameters"), rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def vllm_oracle() -> str:
    """The findings of tests/vllm/test_vllm_oracle*.py: what differs, and requests by graph and path."""
    oracle = json.loads((ROOT / "docs" / "vllm_oracle.json").read_text(encoding="utf-8"))
    graphs, models = oracle["graphs"], oracle["models"]
    every = [*graphs.values(), *models.values()]
    differs = sorted(
        {f"- {name}: {how}" for found in every for row in found.values() for name, how in row["differs"].items()}
    )
    kinds: dict[str, dict[str, Any]] = {}
    for name, found in models.items():  # "adapters, aggregated"
        kinds.setdefault(name.partition(",")[0], {}).update(found)
    first = {path: row for found in reversed(graphs.values()) for path, row in found.items()}
    paths = {path: first[path] for found in graphs.values() for path in found}
    compared = [f"- {name}: {_counts(found)}" for name, found in ({", ".join(graphs): paths} | kinds).items()]
    return "\n\n".join(
        [
            f"Against `vllm serve` {oracle['vllm']}. What differs:",
            "\n".join(differs),
            "What was compared (requests, in brackets the streamed ones):",
            "\n".join(compared),
        ]
    )


def _counts(paths: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"`{path}` {row['requests']} ({row['streamed']})" for path, row in paths.items())


def answers() -> str:
    """The commands with `--json`, each with its schema."""
    from dynamo_local.cli.schemas import ANSWERS

    rows = (
        (f"`dynamo {answer.command} --json`", f"[`{name}`]({SCHEMAS}/{name}.schema.json)", str(answer.version))
        for name, answer in ANSWERS.items()
    )
    return table(("Command", "Schema", "Version"), rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "allowed-environment": allowed_environment,
    "answers": answers,
    "arbiter-metrics": arbiter_metrics,
    "commands": commands,
    "doctor-checks": doctor_checks,
    "effects": effects,
    "episode-adoption": _episode("adoption"),
    "episode-crash": _episode("crash"),
    "episode-drain": _episode("drain"),
    "episode-rolling-restart": _episode("rolling-restart"),
    "episode-scale": _episode("scale"),
    "episode-swap": _episode("swap"),
    "events": events,
    "generator-keys": generator_keys,
    "frontend-options": _section("Frontend"),
    "http-errors": http_errors,
    "http-frontend-options": http_frontend_options,
    "http-options": http_options,
    "import-contracts": import_contracts,
    "lifecycle": lifecycle,
    "metrics": metrics,
    "parameters": parameters,
    "planner-options": planner_options,
    "prefill-worker-options": _section("PrefillWorker", like="VllmWorker"),
    "processor-options": _section("Processor"),
    "refused-commands": refused_commands,
    "role-traits": role_traits,
    "navigation": navigation,
    "packages": packages,
    "router-options": _section("Router", like="Processor"),
    "state-traits": state_traits,
    "vllm-oracle": vllm_oracle,
    "vllm-worker-options": _section("VllmWorker", like="Processor"),
}


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


def schemas() -> dict[Path, str]:
    """The files of `docs/schemas` as they should be: one for each answer of `--json`."""
    from dynamo_local.cli.schemas import ANSWERS, schema_of

    folder = ROOT / "docs" / SCHEMAS
    return {folder / f"{name}.schema.json": json.dumps(schema_of(name), indent=2) + "\n" for name in ANSWERS}


def broken(old: str, new: str) -> list[str]:
    """Keys that readers of the old schema miss in the new one, although both have the same version."""
    before, after = json.loads(old), json.loads(new)
    if before["$id"] != after["$id"]:
        return []
    had, has = _keys(before, before, "$"), _keys(after, after, "$")
    return [
        f"{path} ({'is gone' if path not in has else 'another type'})" for path in had if had[path] != has.get(path)
    ]


def _keys(schema: Mapping[str, Any], whole: Mapping[str, Any], path: str) -> dict[str, set[str]]:
    """Path of each value -> its types. None of our records holds itself."""
    if "$ref" in schema:
        return _keys(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole, path)
    found: dict[str, set[str]] = {}
    more = schema.get("additionalProperties")
    inner = [(f"{path}.{name}", value) for name, value in schema.get("properties", {}).items()]
    inner += [(path, value) for value in schema.get("anyOf", ())]
    inner += [(f"{path}[]", schema["items"])] if isinstance(schema.get("items"), dict) else []
    inner += [(f"{path}.*", more)] if isinstance(more, dict) else []
    if "anyOf" not in schema:
        found[path] = {schema.get("type", "any")}
    for at, value in inner:
        for key, types_ in _keys(value, whole, at).items():
            found.setdefault(key, set()).update(types_)
    return found


def main() -> int:
    """Rewrite all pages and schemas, or with --check only compare them."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a part is not current")
    check = parser.parse_args().check
    wanted = {page: PART.sub(lambda match: render(match["name"]), page.read_text("utf-8")) for page in pages()}
    stale = []
    for file, new in (wanted | schemas()).items():
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if new == text:
            continue
        stale.append(file.relative_to(ROOT).as_posix())
        if text and file not in wanted and (missed := broken(text, new)):
            sys.stderr.write(f"{stale[-1]}: {', '.join(missed)}: raise its version in dynamo_local/cli/schemas.py\n")
            return 1
        if not check:
            file.write_text(new, encoding="utf-8")
    if stale:
        sys.stdout.write(("not current: " if check else "written: ") + ", ".join(stale) + "\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
