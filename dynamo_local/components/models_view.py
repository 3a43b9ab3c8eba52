"""The models that are served now: a live view of `{namespace}/models/` in etcd. HTTP servers that only prefill stand
under `{namespace}/prefill_models/`, adapters of a model under `{namespace}/adapters/`.

Each ready worker that serves a model keeps a key `{namespace}/models/{name}:{lease hex}` under its lease, with
`{"name", "component", "endpoint", "max_model_len", "created"}`. A model is served as long as it has a key.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.errors import InfraUnavailable
from dynamo_local.ports import DeleteEvent, EngineInfo, KeyValue, KeyValueStore, PutEvent, SnapshotEvent, WatchEvent

logger = logging.getLogger(__name__)

WATCH_RETRY_S = 0.5
"""The store reconnects by itself; if a watch fails nevertheless, we wait this long before a new one."""


def models_prefix(namespace: str) -> str:
    """`dynamo/models/`"""
    return f"{namespace}/models/"


def prefill_models_prefix(namespace: str) -> str:
    """`dynamo/prefill_models/`: apart, because servers that only prefill a model do not serve it."""
    return f"{namespace}/prefill_models/"


def adapters_prefix(namespace: str) -> str:
    """`dynamo/adapters/`: apart, because an adapter is served by its model's workers, and is gone with them."""
    return f"{namespace}/adapters/"


def model_key_prefix(namespace: str, name: str) -> str:
    """The key for `WorkerContext.register_key`, which appends `:{lease hex}`."""
    return models_prefix(namespace) + name


class EngineApi(msgspec.Struct, frozen=True):
    """An engine with an API of its own, which a Processor can host: vLLM. `words` are the engine's arguments, `tasks`
    what it can do with this model."""

    name: str
    version: str
    words: list[str]
    tasks: list[str]


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of a key. `max_model_len` is in tokens, None for an HTTP server that does not say; `created` is in
    seconds since the Unix epoch."""

    name: str
    component: str
    endpoint: str
    max_model_len: int | None
    created: float
    engine: EngineApi | None = None
    """The facts that the API of this model's engine is made from, if the engine has an API of its own."""
    parent: str | None = None
    """The model that an adapter adapts. The adapter's `root` is the folder that it is in."""
    root: str | None = None

    def encode(self) -> bytes:
        """The JSON to register."""
        return msgspec.json.encode(self)


def engine_api(info: EngineInfo) -> EngineApi | None:
    """The engine as a worker's card describes it."""
    said = info.options
    if "tasks" not in said:
        return None
    return EngineApi(info.engine, said["version"], list(said["words"]), list(said["tasks"]))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model over all its workers: the oldest `created_s`, the shortest `max_model_len`, its `components` by name.
    `engine` is the first worker's, if it has an API of its own. `parent` and `root` are an adapter's."""

    name: str
    created_s: int
    max_model_len: int | None
    instances: int
    components: tuple[str, ...] = ()
    engine: EngineApi | None = None
    parent: str | None = None
    root: str | None = None


class Availability(enum.Enum):
    """The answer to a model's name: serve it, "come back later", or "no such model"."""

    READY = "ready"
    GONE = "gone"
    UNKNOWN = "unknown"


class ModelsView:
    """Updated with watch events by `follow`, read by the HTTP handlers.

    `expected` are models that count as known before their first worker came (`served_model_name`). `prefix` is where
    the keys are, by default `models_prefix(namespace)`.
    """

    def __init__(
        self, namespace: str, expected: str | Sequence[str] | None = None, *, prefix: str | None = None
    ) -> None:
        self._prefix = models_prefix(namespace) if prefix is None else prefix
        self._cards: dict[str, ModelCard] = {}
        self._models: dict[str, ServedModel] = {}
        self._known = {expected} if isinstance(expected, str) else set(expected or ())
        self._ready = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each event. The listener must return at once."""
        self._listeners.append(listener)

    def models(self) -> list[ServedModel]:
        """The models with a ready worker, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def absent(self) -> list[str]:
        """Known models that nobody serves now, by name."""
        return sorted(self._known - self._models.keys())

    def get(self, name: str) -> ServedModel | None:
        """The model of that name, if somebody serves it now."""
        return self._models.get(name)

    def availability(self, name: str) -> Availability:
        """Whether it is served now, was once, or never."""
        if name in self._models:
            return Availability.READY
        return Availability.GONE if name in self._known else Availability.UNKNOWN

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether a model is served, waiting for the first one up to `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    async def follow(self, kv: KeyValueStore) -> None:
        """Watch until cancelled. The last known models stay while the store is away."""
        while True:
            events: AsyncIterator[WatchEvent] = kv.watch_prefix(self._prefix)
            try:
                async for event in events:
                    self.apply(event)
            except InfraUnavailable as error:
                logger.warning("model list: the watch of %s failed and is started again: %s", self._prefix, error)
            finally:
                aclose = getattr(events, "aclose", None)
                if aclose is not None:
                    await aclose()
            await asyncio.sleep(WATCH_RETRY_S)

    def apply(self, event: WatchEvent) -> None:
        """Update the view with one event."""
        if isinstance(event, SnapshotEvent):
            self._replace(event.kvs)
        elif isinstance(event, PutEvent):
            self._put(event.kv)
        elif isinstance(event, DeleteEvent):
            self._cards.pop(event.key, None)
        self._rebuild()

    def _replace(self, kvs: Iterable[KeyValue]) -> None:
        self._cards = {}
        for kv in kvs:
            self._put(kv)

    def _put(self, kv: KeyValue) -> None:
        try:
            card = msgspec.json.decode(kv.value, type=ModelCard)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.error("model list: key %s holds no model card and is left out: %s", kv.key, error)
            self._cards.pop(kv.key, None)
            return
        self._cards[kv.key] = card

    def _rebuild(self) -> None:
        before = self._models.keys()
        grouped: dict[str, list[ModelCard]] = {}
        for card in self._cards.values():
            grouped.setdefault(card.name, []).append(card)
        self._models = {
            name: ServedModel(
                name=name,
                created_s=int(min(card.created for card in cards)),
                max_model_len=min((n for card in cards if (n := card.max_model_len) is not None), default=None),
                instances=len(cards),
                components=tuple(sorted({card.component for card in cards})),
                engine=next((card.engine for card in cards if card.engine is not None), None),
                parent=cards[0].parent,
                root=cards[0].root,
            )
            for name, cards in grouped.items()
        }
        for name in self._models.keys() - before:
            logger.info("%s%s: it has a worker", self._prefix, name)
        for name in before - self._models.keys():
            logger.info("%s%s: it has lost its last worker", self._prefix, name)
        self._known.update(self._models)
        if self._models:
            self._ready.set()
        else:
            self._ready.clear()
        for listener in self._listeners:
            listener()
