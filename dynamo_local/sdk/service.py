"""The decorators of a graph: `@service`, `@endpoint`, `depends`, `@async_on_start`, `@on_shutdown`, and `link`.

Dynamo's spellings are accepted if they mean something on one host. Others are refused at the decorator, with file and
line.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Any, Generic, TypeVar, get_type_hints, overload

from dynamo_local.core.types import Role
from dynamo_local.errors import GraphError
from dynamo_local.sdk.checks import (
    Place,
    caller_place,
    check_endpoint_name,
    check_namespace,
    check_service_name,
    importing_module,
    listing,
    nearest,
    parse_envs,
    parse_resources,
    parse_role,
    parse_workers,
)


@dataclass(frozen=True, slots=True)
class Edge:
    """`source.link(target)`, the line that said so, and the module if that was at its top level.

    `graphs/agg.py` and `graphs/disagg.py` link the same `Frontend` object in different ways. So an edge belongs to the
    recording during which it was made: `load_graph` opens one for each graph that it imports. `colocate`: the target
    runs in the source's processes, unless the configuration says otherwise.
    """

    source: DynamoService[Any]
    target: DynamoService[Any]
    module: str | None
    place: Place
    colocate: bool = False


_edges: list[Edge] = []
_linking_modules: set[str] = set()


def record(edge: Edge) -> None:
    """Add an edge to the recording of now. Saying the same twice is no second edge."""
    if edge.module is not None:
        _linking_modules.add(edge.module)
    if not any(known.source is edge.source and known.target is edge.target for known in _edges):
        _edges.append(edge)


@contextmanager
def recording() -> Iterator[list[Edge]]:
    """Collect the edges made inside; those made before are set aside and come back."""
    global _edges
    before, _edges = _edges, []
    try:
        yield _edges
    finally:
        _edges = before


def edges() -> tuple[Edge, ...]:
    """Edges of the recording of now."""
    return tuple(_edges)


def linking_modules() -> frozenset[str]:
    """Modules that ever called `link` while imported: they must be imported again to say their links again."""
    return frozenset(_linking_modules)


def reset_links() -> None:
    """Forget all edges. For tests that link without `load_graph`."""
    _edges.clear()


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_DYNAMO_KEYS = ("namespace", "role", "enabled", "name", "component_type", "custom_lease")
_WITHOUT_MEANING = frozenset({"traffic", "image", "labels"})
"""Keywords of Dynamo's `@service` about BentoML and Kubernetes: accepted so that graphs port, and not used."""

_MODEL_MARKS = ("model_validate", "__struct_fields__")
"""Attributes of a request model: they identify one without an import of pydantic or msgspec."""

_ENDPOINT_MARK = "__dynamo_endpoint__"
_START_MARK = "__dynamo_startup_hook__"
_SHUTDOWN_MARK = "__dynamo_shutdown_hook__"


@dataclass(frozen=True, slots=True)
class EndpointDecl:
    """An endpoint of a service: its registered name, the method that serves it, and whether that one streams."""

    name: str
    method: str
    is_stream: bool


class Dependency:
    """`depends(Other)` as a class attribute; on an instance of a running worker, a client of that component.

    The attribute is a descriptor without `__set__`: `bind` puts the client into the instance's `__dict__`,
    where it hides the descriptor at the cost of a plain attribute.
    """

    def __init__(self, on: DynamoService[Any], optional: bool) -> None:
        self.on = on
        self.optional = optional
        self.attr = "?"

    def __set_name__(self, owner: type, name: str) -> None:
        self.attr = name

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise RuntimeError(
            f"{type(instance).__name__}.{self.attr} has no client of {self.on.name} yet: "
            "dependencies are bound by the worker's entry point; in a test call bind_dependencies()"
        )

    def bind(self, instance: object, client: Any) -> None:
        """Make `instance.<attr>` return `client` (None: an optional component that does not run)."""
        if client is None and not self.optional:
            raise ValueError(f"{type(instance).__name__}.{self.attr} is not optional: it needs a client")
        vars(instance)[self.attr] = client

    def __repr__(self) -> str:
        return f"depends({self.on.name}{', optional=True' if self.optional else ''})"


class DynamoService(Generic[T]):
    """A declared service: the user's class (`inner`), and what the decorator said about it.

    `namespace` is None where none was given; `config_model` is the pydantic model of its section, or None.
    """

    def __init__(
        self,
        inner: type[T],
        *,
        name: str | None = None,
        dynamo: Mapping[str, Any] | None = None,
        resources: Mapping[str, Any] | None = None,
        workers: int | str = 1,
        envs: Any = None,
        config: type | None = None,
    ) -> None:
        self.place = caller_place()
        functools.update_wrapper(self, inner, updated=())
        options = dict(dynamo or {})
        try:
            for key in options:
                if key not in _DYNAMO_KEYS:
                    raise ValueError(f"dynamo[{key!r}] is unknown; allowed: {listing(_DYNAMO_KEYS)}"
                                     f"{nearest(str(key), _DYNAMO_KEYS)}")  # fmt: skip
            if options.get("enabled", True) is not True:
                raise ValueError("dynamo={'enabled': False} cannot run here: a component that registers nowhere")
            self.name = check_service_name(name or options.get("name") or inner.__name__)
            self.namespace = None if options.get("namespace") is None else check_namespace(options["namespace"])
            self.role: Role = parse_role(options.get("role"), self.name)
            self.resources = parse_resources(resources)
            self.workers = parse_workers(workers)
            self.envs: Mapping[str, str] = MappingProxyType(parse_envs(envs))
            self.config_model = _config_model(config)
            members = _members(inner)
            self.depends: Mapping[str, Dependency] = MappingProxyType(_dependencies(inner, members))
            self.endpoints: Mapping[str, EndpointDecl] = MappingProxyType(_endpoints(members))
        except ValueError as error:
            raise _refused(f"{inner.__name__}: {error}") from None
        self.inner: type[T] = inner
        self.on_start = tuple(attr for attr, member in members.items() if hasattr(member, _START_MARK))
        self.on_shutdown = tuple(attr for attr, member in members.items() if hasattr(member, _SHUTDOWN_MARK))

    def link(self, other: DynamoService[Any], *, colocate: bool = False) -> DynamoService[Any]:
        """Say that `other` runs in graphs whose root leads here; returns `other`, so that links chain.

        `colocate`: it runs in this service's processes, unless the configuration gives it workers of its own.
        """
        if not isinstance(other, DynamoService):
            raise _refused(f"{self.name}.link({other!r}): not a service; decorate the class with @service")
        if other is self:
            raise _refused(f"{self.name}.link({self.name}): a service cannot be linked to itself")
        record(Edge(self, other, importing_module(), caller_place(), colocate))
        return other

    def request_model(self, endpoint_name: str) -> type | None:
        """The annotation of the endpoint method's request: a pydantic model or a msgspec `Struct`, or None.

        `NoneType` if the method annotates None, because it ignores the request.
        """
        method = inspect.unwrap(getattr(self.inner, self.endpoints[endpoint_name].method))
        parameters = list(inspect.signature(method).parameters)[1:]
        try:
            hint = get_type_hints(method).get(parameters[0]) if parameters else None
        except (NameError, TypeError, AttributeError):
            return None  # an annotation that exists for type checkers only
        return hint if hint is NoneType or any(hasattr(hint, mark) for mark in _MODEL_MARKS) else None

    def create(self, clients: Mapping[str, Any], *args: Any, **kwargs: Any) -> T:
        """An instance whose dependencies are bound before `__init__` runs, as Dynamo's are."""
        instance = self.inner.__new__(self.inner, *args, **kwargs)
        bind_dependencies(instance, clients)
        instance.__init__(*args, **kwargs)  # type: ignore[misc]
        return instance

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        return self.inner(*args, **kwargs)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """A service can be a base class: `class Mine(VllmWorker)` derives from the user's class."""
        return (self.inner,)

    def __repr__(self) -> str:
        return f"<service {self.name} at {self.place}>"


@overload
def service(inner: type[T], /) -> DynamoService[T]: ...


@overload
def service(
    *,
    name: str | None = None,
    dynamo: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    workers: int | str = 1,
    envs: Any = None,
    config: type | None = None,
    **options: Any,
) -> Callable[[type[T]], DynamoService[T]]: ...


def service(inner: Any = None, /, **options: Any) -> Any:
    """Declare a class as a service: `@service`, or `@service(dynamo={...}, resources={...}, workers=2)`.

    `dynamo`: `namespace`, `role` (decode, prefill, aggregated, frontend, other). `resources`: `gpu`, `cpu`,
    `memory`, per worker. `config`: a pydantic model of its configuration section. `envs`: a mapping.
    Raises `GraphError` with the place where something cannot be used.
    """
    known = inspect.signature(DynamoService.__init__).parameters
    for key in options:
        if key not in known and key not in _WITHOUT_MEANING:
            allowed = [name for name in known if name not in ("self", "inner")]
            raise _refused(f"@service({key}=…) is unknown; allowed: {listing(allowed)}{nearest(key, allowed)}")
    used = {key: value for key, value in options.items() if key in known}

    def decorate(cls: Any) -> DynamoService[Any]:
        if isinstance(cls, DynamoService):
            raise _refused(f"{cls.name} is a service already: one @service is enough")
        if not isinstance(cls, type):
            raise _refused(f"@service decorates classes, not {cls!r}")
        return DynamoService(cls, **used)

    return decorate if inner is None else decorate(inner)


def endpoint(name: Any = None, **options: Any) -> Any:
    """Serve a method under a name (default: its own): `@endpoint`, `@endpoint()`, `@endpoint(name="chat/completions")`.

    The method is a coroutine (one answer) or an asynchronous generator (a stream) that takes one request.
    """
    if options:
        raise _refused(
            f"@endpoint({next(iter(options))}=…) is not supported: endpoints are served over NATS, "
            "and HTTP by the Frontend"
        )
    if callable(name) and not isinstance(name, str):
        return _mark_endpoint(name, None)
    return lambda method: _mark_endpoint(method, name)


dynamo_endpoint = endpoint


def depends(on: Any = None, *, optional: bool = False) -> Any:
    """A client of another service, as a class attribute. With `optional`, None where that service does not run."""
    if not isinstance(on, DynamoService):
        raise _refused(f"depends({'' if on is None else repr(on)}): not a service; decorate the class with @service")
    return Dependency(on, optional)


def async_on_start(method: F | None = None) -> Any:
    """Run this method (coroutine or not) after `__init__` and before any endpoint takes requests."""
    return _mark(method, _START_MARK)


def on_shutdown(method: F | None = None) -> Any:
    """Run this method (coroutine or not) when the last request has finished, before the worker exits."""
    return _mark(method, _SHUTDOWN_MARK)


def bind_dependencies(instance: object, clients: Mapping[str, Any]) -> None:
    """Give each `depends` attribute of the instance its client; every one needs an entry (None for absent optionals).

    Raises `ValueError` naming an attribute that is missing, or that is no dependency.
    """
    declared = {attr: m for attr, m in _members(type(instance)).items() if isinstance(m, Dependency)}
    for attr in clients:
        if attr not in declared:
            raise ValueError(f"{type(instance).__name__}.{attr} is not a dependency; those are {listing(declared)}")
    for attr, dependency in declared.items():
        if attr not in clients and not dependency.optional:
            raise ValueError(f"{type(instance).__name__}.{attr} needs a client of {dependency.on.name}")
        dependency.bind(instance, clients.get(attr))


def _refused(reason: str) -> GraphError:
    place = caller_place()
    return GraphError(f"{place}: {reason}", place=str(place))


def _mark(method: Any, mark: str) -> Any:
    if method is None:
        return functools.partial(_mark, mark=mark)
    if not callable(method):
        raise _refused(f"{method!r} is not a method")
    setattr(method, mark, True)
    return method


def _mark_endpoint(method: Any, name: str | None) -> Any:
    shown = getattr(method, "__qualname__", repr(method))
    if not (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
        raise _refused(f"@endpoint on {shown}: must be `async def`, a coroutine or an asynchronous generator")
    try:
        setattr(method, _ENDPOINT_MARK, check_endpoint_name(method.__name__ if name is None else name))
    except ValueError as error:
        raise _refused(f"@endpoint on {shown}: {error}") from None
    return method


def _members(cls: type) -> dict[str, Any]:
    """Attributes in order of definition, base classes first; what a subclass overrides is the subclass's."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        found.update(vars(base))
    return found


def _dependencies(cls: type, members: Mapping[str, Any]) -> dict[str, Dependency]:
    found = {attr: member for attr, member in members.items() if isinstance(member, Dependency)}
    if found and not cls.__dictoffset__:
        raise ValueError("a class with __slots__ cannot have depends() attributes")
    return found


def _endpoints(members: Mapping[str, Any]) -> dict[str, EndpointDecl]:
    found: dict[str, EndpointDecl] = {}
    for attr, member in members.items():
        name = getattr(member, _ENDPOINT_MARK, None)
        if name is None:
            continue
        if name in found:
            raise ValueError(f"two endpoints are named {name!r}: {found[name].method} and {attr}")
        found[name] = EndpointDecl(name, attr, inspect.isasyncgenfunction(member))
    return found


def _config_model(config: type | None) -> type | None:
    # Asked by its attributes: importing pydantic costs a tenth of a second, and most services declare no model.
    if config is not None and not (isinstance(config, type) and hasattr(config, "model_fields")):
        raise ValueError(f"config must be a pydantic model class, not {config!r}")
    return config
