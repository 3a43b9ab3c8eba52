"""Which services run in another's processes: by links, by the configuration, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dynamo_local.arbiter.deployment import Settings, WatcherFactory
from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import ConfigError, UnknownWorker
from dynamo_local.sdk import service
from dynamo_local.sdk.loader import build_graph
from dynamo_local.sdk.service import depends, endpoint, recording
from dynamo_local.system.paths import Paths


@service(dynamo={"namespace": "tests"}, resources={"gpu": 1})
class VllmWorker:
    """Computes."""

    @endpoint()
    async def generate(self, request: dict[str, str]) -> str:
        return "token"


@service(dynamo={"namespace": "tests"}, envs={"A": "router", "B": "router"})
class Router:
    """Chooses a worker."""

    worker = depends(VllmWorker)


@service(dynamo={"namespace": "tests"})
class Processor:
    """Calls both."""

    worker = depends(VllmWorker)
    router = depends(Router, optional=True)


@service(dynamo={"namespace": "tests"})
class Frontend:
    """Calls the Processor."""

    processor = depends(Processor)


def run(text: str = "", *, colocate: bool = True, words: Sequence[str] = ()) -> GraphSpec:
    """The graph whose links propose to have all but the worker together."""
    with recording() as edges:
        Frontend.link(Processor, colocate=colocate).link(Router, colocate=colocate).link(VllmWorker)
    graph = build_graph(Frontend, tuple(edges), "tests:Frontend")
    return resolve(graph, load_config(None, env={"DYN_DEPLOYMENT_CONFIG": text}, overrides=words), namespace=None)


def shape(spec: GraphSpec) -> dict[str, tuple[str, ...]]:
    """Who has workers, and who runs in their processes."""
    return {each.name: tuple(guest.name for guest in each.guests) for each in spec.services}


def test_a_link_proposes_and_a_guests_guest_runs_with_the_host() -> None:
    spec = run()
    assert shape(spec) == {"Frontend": ("Processor", "Router"), "VllmWorker": ()}
    assert [each.name for each in spec.components] == ["Frontend", "Processor", "Router", "VllmWorker"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Frontend: {ServiceArgs: {colocate: []}}", {"Frontend": (), "Processor": ("Router",), "VllmWorker": ()}),
        ("Processor: {ServiceArgs: {workers: 2}}", {"Frontend": (), "Processor": ("Router",), "VllmWorker": ()}),
        ("Processor: {ServiceArgs: {colocate: []}}", {"Frontend": (), "Processor": (), "Router": (), "VllmWorker": ()}),
        ("VllmWorker: {engine: vllm}", {"Frontend": (), "Processor": (), "Router": (), "VllmWorker": ()}),
        ("Router: {ServiceArgs: {envs: {X: y}}}", {"Frontend": ("Processor",), "Router": (), "VllmWorker": ()}),
    ],
)
def test_the_configuration_takes_them_apart(text: str, expected: dict[str, tuple[str, ...]]) -> None:
    """By `colocate` of the host, or by giving the guest workers of its own, whatever is said of them."""
    assert shape(run(text)) == expected


def test_the_configuration_puts_together_what_no_link_does() -> None:
    expected = {"Frontend": ("Processor", "Router"), "VllmWorker": ()}
    assert shape(run("Frontend: {ServiceArgs: {colocate: [Processor, Router]}}", colocate=False)) == expected
    words = ["--Frontend.ServiceArgs.colocate=Processor,Router"]
    assert shape(run(colocate=False, words=words)) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Frontend: {ServiceArgs: {colocate: [Procesor]}}", "'Procesor' is no service.*did you mean 'Processor'"),
        ("Frontend: {ServiceArgs: {colocate: [Frontend]}}", "it is that service itself"),
        ("Processor: {ServiceArgs: {colocate: [Frontend]}}", "it is the graph's root"),
        ("Frontend: {ServiceArgs: {colocate: [VllmWorker]}}", "VllmWorker has an engine"),
        ("VllmWorker: {ServiceArgs: {colocate: [Router]}}", "VllmWorker has an engine"),
        ("Frontend: {ServiceArgs: {colocate: [Router]}}", "Processor calls Router.*colocate Processor with Frontend"),
        (
            "Frontend: {ServiceArgs: {colocate: [Processor]}}\nProcessor: {ServiceArgs: {workers: 2}}",
            "Processor has ServiceArgs.workers.*Frontend.ServiceArgs.workers",
        ),
        (
            "Frontend: {ServiceArgs: {colocate: [Processor, Router]}}\nProcessor: {ServiceArgs: {colocate: [Router]}}",
            "Processor has ServiceArgs.colocate",
        ),
        ("Frontend: {ServiceArgs: {colocate: 7}}", "must be a list of names"),
        ("Frontend: {ServiceArgs: {colocate: [Router, Router]}}", "names a service twice"),
    ],
)
def test_what_cannot_run_together_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        run(text, colocate=False)
    assert "\n" not in str(raised.value)


def test_a_worker_is_told_of_its_guests_and_renewed_when_their_options_change() -> None:
    spec = run("Frontend: {ServiceArgs: {envs: {B: mine}}}")
    env = _factory(spec).plan(spec.service("Frontend"), "tests_Frontend", ()).env
    assert (env["DYN_COLOCATED"], env["A"], env["B"]) == ("Processor,Router", "router", "mine")
    assert "DYN_COLOCATED" not in _factory(spec).plan(spec.service("VllmWorker"), "tests_VllmWorker", ()).env
    prints = {_factory(run(text)).templates()[0].fingerprint for text in ("", "Router: {router-seed: 7}")}
    assert len(prints) == 2


def test_orders_to_a_guest_say_whose_process_it_is_in() -> None:
    """Of its component, and of the worker that it would have."""
    view = Fleet("tests", _factory(run()).templates())
    for ask in (view.template, view.worker):
        with pytest.raises(UnknownWorker, match=r"Router runs in Frontend's processes.*colocate: \[\]"):
            ask("Router")
    with pytest.raises(UnknownWorker, match="there is no component 'Nobody'"):
        view.template("Nobody")


def _factory(spec: GraphSpec) -> WatcherFactory:
    paths = Paths.of(spec.namespace, {"HOME": "/home/nobody", "XDG_RUNTIME_DIR": "/run/nobody"})
    return WatcherFactory(spec, Settings(), paths, "run", paths.runtime, "{}", {})
