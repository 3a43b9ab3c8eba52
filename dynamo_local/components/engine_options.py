"""From a worker's section to a started engine. The engine's package is imported only when it is used."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_local.components.model import TINY_MODEL, TINY_TOKENS
from dynamo_local.engines import make_engine
from dynamo_local.errors import ConfigError
from dynamo_local.ports import Engine, KvEventPublisher

log = logging.getLogger(__name__)


def check_sim_options(options: dict[str, Any]) -> dict[str, Any]:
    """For pydantic validators: the options as they are, or ValueError with the sim engine's own explanation."""
    from dynamo_local.engines.sim.options import SimOptions

    try:
        SimOptions.from_mapping(options)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return options


def sim_options(model: str, max_model_len: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The sim engine's options, with the ids that the model's tokenizer can show where none were given."""
    merged: dict[str, Any] = {str(key).replace("-", "_"): value for key, value in options.items()}
    merged.setdefault("model", model)
    if max_model_len is not None:
        merged["max_model_len"] = max_model_len
    low, high = TINY_TOKENS if model == TINY_MODEL else (None, _vocab_size(model))
    if low is not None:
        merged.setdefault("token_low", low)
    if high is not None:
        merged.setdefault("token_high", high)
    return merged


def _vocab_size(model: str) -> int | None:
    """From the folder's config.json; None where it does not say."""
    path = Path(model).expanduser() / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model folder {model}: config.json cannot be read: {error}") from error
    return value if isinstance(value, int) else None


async def start_engine(
    kind: str,
    model: str,
    max_model_len: int | None,
    options: Mapping[str, Any],
    kv_events: KvEventPublisher | None = None,
) -> Engine:
    """A started engine. Raises `ConfigError` for options that cannot be used. Cancelled, it leaves no engine behind."""
    engine = make_engine(kind, sim_options(model, max_model_len, options), kv_events=kv_events)
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    log.info("engine ready: %s", engine.info)
    return engine
