"""Tests what the decorators make of a user's classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from dynamo_local.core.types import Resources, Role
from dynamo_local.errors import ConfigError, GraphError
from dynamo_local.sdk import service
from dynamo_local.sdk.service import (
    DynamoService,
    EndpointDecl,
    async_on_start,
    bind_dependencies,
    depends,
    dynamo_endpoint,
    edges,
    endpoint,
    on_shutdown,
    reset_links,
)
from dynamo_local.sdk.service_config import ServiceConfig
from dynamo_local.sdk.settings import load_settings


@pytest.fixture(autouse=True)
def _no_links() -> Iterator[None]:
    reset_links()
    yield
    reset_links()


class Options(BaseModel):
    """A section's model."""

    port: int = 8000


class Request(BaseModel):
    """An endpoint's request."""

    text: str


@service
class Backend:
    """A service without anything."""

    @endpoint
    async def generate(self, request: Request) -> Any:
        yield request.text


def test_plain_decorator_gives_defaults() -> None:
    assert isinstance(Backend, DynamoService)
    assert (Backend.name, Backend.namespace, Backend.role, Backend.workers) == ("Backend", None, Role.OTHER, 1)
    assert (Backend.resources, dict(Backend.envs), Backend.config_model) == (Resources(), {}, None)
    assert Backend.__doc__ == "A service without anything."
    assert str(Backend.place).startswith("tests/unit/sdk/test_declarations.py:")


def test_all_options_are_read_in_dynamos_spellings() -> None:
    """Resources as text, `enabled`, list-form envs, and BentoML's `traffic` and `image` (issue 2, item 2)."""

    @service(
        name="Worker",
        dynamo={"namespace": "inference", "enabled": True, "role": "aggregated"},
        resources={"gpu": "1", "cpu": "10", "memory": "20Gi"},
        workers=2,
        envs=[{"name": "A", "value": "1"}],
        config=Options,
        traffic={"timeout": 30},
        image="dynamo:latest",
    )
    class Any_:
        pass

    assert (Any_.name, Any_.namespace, Any_.role, Any_.workers) == ("Worker", "inference", Role.AGGREGATED, 2)
    assert Any_.resources == Resources(gpu=1, cpu="10", memory="20Gi")
    assert dict(Any_.envs) == {"A": "1"}
    assert Any_.config_model is Options


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("VllmWorker", Role.DECODE),
        ("PrefillWorker", Role.PREFILL),
        ("Frontend", Role.FRONTEND),
        ("Processor", Role.OTHER),
    ],
)
def test_role_follows_the_name_by_default(name: str, role: Role) -> None:
    """VllmWorker decode, PrefillWorker prefill, Frontend frontend, else other."""
    assert service(name=name)(type("Cls", (), {})).role is role


def test_endpoints_keep_names_order_and_kind() -> None:

    @service
    class Processor:
        @endpoint(name="chat/completions")
        async def chat(self, request: Any) -> Any:
            yield request

        @dynamo_endpoint()
        async def info(self, request: Any) -> Any:
            return request

    assert dict(Processor.endpoints) == {
        "chat/completions": EndpointDecl("chat/completions", "chat", is_stream=True),
        "info": EndpointDecl("info", "info", is_stream=False),
    }


async def test_methods_stay_plain_methods() -> None:
    assert [item async for item in Backend().generate(Request(text="a"))] == ["a"]


def test_request_model_is_found_where_the_annotation_says_it() -> None:
    assert Backend.request_model("generate") is Request


def test_request_model_is_none_for_other_annotations() -> None:

    @service
    class Plain:
        @endpoint()
        async def generate(self, request: dict[str, Any]) -> Any:
            return request

        @endpoint()
        async def bare(self):  # type: ignore[no-untyped-def]
            return None

    assert Plain.request_model("generate") is None
    assert Plain.request_model("bare") is None


def test_hooks_are_named_in_order_of_definition() -> None:

    class Base:
        @async_on_start
        async def first(self) -> None: ...

    @service
    class Derived(Base):
        @async_on_start()
        async def second(self) -> None: ...

        @on_shutdown
        async def last(self) -> None: ...

    assert Derived.on_start == ("first", "second")
    assert Derived.on_shutdown == ("last",)


def test_a_service_can_be_derived_from_another() -> None:

    @service
    class Mine(Backend):  # type: ignore[misc,valid-type]
        pass

    assert Mine.inner.__mro__[1] is Backend.inner
    assert list(Mine.endpoints) == ["generate"]


def test_an_override_without_endpoint_is_no_endpoint() -> None:

    @service
    class Silent(Backend):  # type: ignore[misc,valid-type]
        generate = None

    assert dict(Silent.endpoints) == {}


def test_dependency_before_binding_raises_and_names_the_component() -> None:
    """An access too early is a bug, and says what to call; it is no AttributeError that getattr would swallow."""

    @service
    class Middle:
        backend = depends(Backend)

    with pytest.raises(RuntimeError, match=r"Middle\.backend has no client of Backend yet"):
        _ = Middle().backend


def test_bound_dependency_is_the_client_of_that_instance_only() -> None:

    @service
    class Middle:
        backend = depends(Backend)

    one, two = Middle(), Middle()
    bind_dependencies(one, {"backend": "client 1"})
    bind_dependencies(two, {"backend": "client 2"})

    assert (one.backend, two.backend) == ("client 1", "client 2")


def test_create_binds_before_init_runs() -> None:

    @service
    class Middle:
        backend = depends(Backend)

        def __init__(self) -> None:
            self.seen = self.backend

    assert Middle.create({"backend": "client"}).seen == "client"


def test_optional_dependency_may_be_none_and_others_may_not() -> None:

    @service
    class Middle:
        backend = depends(Backend, optional=True)
        other = depends(Backend)

    assert Middle.create({"backend": None, "other": "x"}).backend is None
    with pytest.raises(ValueError, match=r"Middle\.other needs a client of Backend"):
        Middle.create({"backend": "x"})
    with pytest.raises(ValueError, match=r"Middle\.other is not optional"):
        Middle.create({"other": None})
    with pytest.raises(ValueError, match=r"Middle\.wrong is not a dependency; those are backend, other"):
        Middle.create({"wrong": 1, "other": 2})


def test_link_returns_the_linked_service_and_records_the_edge_once() -> None:
    a, b, c = (service(name=name)(type(name, (), {})) for name in "ABC")

    assert a.link(b).link(c) is c
    a.link(b)

    assert [(edge.source, edge.target) for edge in edges()] == [(a, b), (b, c)]
    assert edges()[0].module is None, "a function said it: importing this module again would not say it again"


def test_refusals_name_the_line_of_the_decorator() -> None:
    with pytest.raises(GraphError, match=r"^tests/unit/sdk/test_declarations\.py:\d+: Broken: resources\.gpu"):

        @service(resources={"gpu": True})
        class Broken:
            pass


@pytest.mark.parametrize("wrong", [None, Options, "Backend"])
def test_depends_takes_services_only(wrong: Any) -> None:
    """Dynamo takes None and fails at run time."""
    with pytest.raises(GraphError, match=r"^tests/.*: depends\(.*\): not a service"):
        depends(wrong)


def test_slots_leave_no_room_for_clients() -> None:
    with pytest.raises(GraphError, match="__slots__"):

        @service
        class Slotted:
            __slots__ = ()
            backend = depends(Backend)


def test_http_endpoints_are_refused_rather_than_ignored() -> None:
    """Dynamo's `is_api` and `transports` would have no effect here."""
    with pytest.raises(GraphError, match=r"@endpoint\(is_api=…\) is not supported"):
        endpoint(is_api=True)


def test_two_service_decorators_are_refused() -> None:
    """The inner one's options would be lost."""
    with pytest.raises(GraphError, match="is a service already"):
        service(Backend)


def test_gpus_are_per_worker_and_the_message_says_so() -> None:
    """`gpu: 3` was read as total."""
    with pytest.raises(GraphError, match="per worker"):
        service(resources={"gpu": "three"})(type("W", (), {}))


# --- service config
# A worker's view of the configuration, under Dynamo's accessors.

SECTIONS = {
    "Common": {"model": "tiny", "block-size": 64},
    "VllmWorker": {
        "max-model-len": 16384,
        "common-configs": ["model", "block-size"],
        "enforce-eager": True,
        "router": None,
        "enable-prefix-caching": False,
        "kv-transfer-config": {"kv_connector": "Nixl"},
        "ServiceArgs": {"workers": 2},
    },
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", json.dumps(SECTIONS))
    ServiceConfig.reset()
    yield
    ServiceConfig.reset()


def test_get_instance_reads_the_variable_once() -> None:
    """One object for the process, as Dynamo's."""
    assert ServiceConfig.get_instance() is ServiceConfig.get_instance()


def test_get_is_a_dicts_get_and_dynamos() -> None:
    config = ServiceConfig.get_instance()

    assert config.get("Frontend", {}) == {}
    assert config.get("VllmWorker", {})["max-model-len"] == 16384
    assert config["VllmWorker"]["max_model_len"] == 16384
    assert "max-model-len" in config["VllmWorker"]
    assert config.get("VllmWorker", "block-size") == 64
    assert config.get("VllmWorker", "missing", 5) == 5
    assert config.get("Frontend", "port") is None


def test_require_names_service_and_key() -> None:
    config = ServiceConfig.get_instance()

    assert config.require("VllmWorker", "model") == "tiny"
    with pytest.raises(ConfigError, match=r"VllmWorker\.dtype must be specified"):
        config.require("VllmWorker", "dtype")


def test_as_args_gives_command_line_words() -> None:
    assert ServiceConfig.get_instance().as_args("VllmWorker") == [
        "--max-model-len",
        "16384",
        "--enforce-eager",
        "--enable-prefix-caching",
        "false",
        "--kv-transfer-config",
        '{"kv_connector": "Nixl"}',
        "--model",
        "tiny",
        "--block-size",
        "64",
    ]


def test_as_args_with_a_prefix_takes_and_strips_it() -> None:
    config = ServiceConfig.get_instance()

    assert config.as_args("VllmWorker", prefix="max-model-") == ["--len", "16384"]
    assert config.as_args("VllmWorker", prefix="max_model_") == ["--len", "16384"]
    assert config.as_args("Nobody") == []


@pytest.mark.parametrize("text", ["{", "[]", '{"A": 1}'])
def test_broken_variable_is_refused_without_quoting_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo went on with an empty configuration."""
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", text)
    ServiceConfig.reset()

    with pytest.raises(ConfigError, match="DYNAMO_SERVICE_CONFIG"):
        ServiceConfig.get_instance()


def test_unset_variable_is_an_empty_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A component that runs without `dynamo serve`."""
    monkeypatch.delenv("DYNAMO_SERVICE_CONFIG")
    ServiceConfig.reset()

    assert ServiceConfig.get_instance() == {}


def test_load_settings_gives_the_services_model() -> None:

    class Options(BaseModel):
        model_config = ConfigDict(extra="allow")
        model: str
        max_model_len: int

    declared = service(name="VllmWorker", config=Options)(type("VllmWorker", (), {}))

    settings = load_settings(declared)

    assert (settings.model, settings.max_model_len) == ("tiny", 16384)
    assert load_settings(service(type("Plain", (), {}))) is None
