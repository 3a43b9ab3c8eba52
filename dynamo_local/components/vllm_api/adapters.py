"""LoRA adapters that a Processor's `serve-args` name: models with names of their own beside the one that they adapt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.errors import ConfigError

_FORM = "`lora-modules` is a list of NAME=FOLDER, or of mappings with a `name` and a `path`"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One of them, and the folder that it is in."""

    name: str
    path: str


def adapters_of(serve_args: Mapping[str, Any]) -> list[Adapter]:
    """Those of `lora-modules`, as `vllm serve` reads it.

    Raises `ConfigError` for another form, and for a folder without an adapter: `vllm serve` would not start with it,
    and a worker would fail the requests that name it.
    """
    given = serve_args.get("lora-modules", serve_args.get("lora_modules"))
    if given is None:
        return []
    several = isinstance(given, Sequence) and not isinstance(given, str)
    found = [_adapter(item) for item in (given if several else [given])]
    for adapter in found:
        folder = Path(adapter.path)
        if folder.is_absolute() and not (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"Processor.serve-args: the adapter {adapter.name!r} is not in {adapter.path}, which has no "
                "adapter_config.json"
            )
    return found


def _adapter(item: Any) -> Adapter:
    if isinstance(item, str) and "=" in item and "," not in item:
        name, _, path = item.partition("=")
        return Adapter(name, path)
    try:
        fields = json.loads(item) if isinstance(item, str) else item
        return Adapter(str(fields["name"]), str(fields["path"]))
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"Processor.serve-args: {item!r} is no adapter; {_FORM}") from error
