"""From a worker's section to the command line of its vLLM engine. Pure; no vLLM needed.

Keys that are not ours go to vLLM under its own names: `max-num-seqs: 64` is `--max-num-seqs 64`. Its parser refuses
what it does not know (`engines.vllm.checks`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dynamo_local.errors import ConfigError

KV_LEASE_S = 30.0
"""vLLM's default of `kv_lease_duration`: how long a prefill engine keeps KV that nobody pulls."""

Transfer = Literal["none", "producer", "consumer", "both"]

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_NOT_HERE = {
    "host": "the Frontend listens, not the engine",
    "port": "the Frontend listens, not the engine",
    "api_server_count": "each worker is one engine; use ServiceArgs.workers",
    "data_parallel_address": "all of an engine runs on this host",
    "headless": "all of an engine runs on this host",
    "nnodes": "all of an engine runs on this host",
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """One engine. `gpus`: number of GPUs of one worker (0: vLLM's CPU build). `args`: vLLM's own, with underscores.

    `transfer`: this engine's end of a KV hand-off. `kv_pull_timeout_s`: how long a request waits for promised KV. It
    must be shorter than the lease of the other side. `sleep_mode`: start with an allocator that supports sleep.
    """

    model: str
    served_model_name: str | None = None
    max_model_len: int | None = None
    gpus: int = 0
    transfer: Transfer = "none"
    kv_pull_timeout_s: float = 20.0
    sleep_mode: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """vLLM's arguments, without the program. Raises `ConfigError` for what cannot work, even if vLLM takes it."""
        args = dict(self.args)
        for name, why in _NOT_HERE.items():
            if name in args:
                raise ConfigError(f"{_hyphened(name)} has no place in a worker's section: {why}")
        given: dict[str, Any] = {"model": self.model}
        if self.served_model_name is not None:
            given["served_model_name"] = self.served_model_name
        if self.max_model_len is not None:
            given["max_model_len"] = self.max_model_len
        if self.sleep_mode and self.gpus:
            given["enable_sleep_mode"] = True
        given |= self._parallel(args)
        if self.transfer != "none":
            given["kv_transfer_config"] = self._kv_transfer(args.pop("kv_transfer_config", None))
        return words_of({**args, **given})

    def _parallel(self, args: Mapping[str, Any]) -> dict[str, int]:
        """Tensor parallelism over the worker's GPUs, unless the section divides them otherwise."""
        sizes = {name: _size(name, args[name]) for name in _PARALLEL if args.get(name) is not None}
        if not self.gpus:
            return sizes
        if "tensor_parallel_size" not in sizes:
            others = _product(sizes.values())
            if self.gpus % others:
                raise ConfigError(f"{self.gpus} GPUs per worker cannot be divided by {others} ({_listed(sizes)})")
            return {**sizes, "tensor_parallel_size": self.gpus // others}
        if _product(sizes.values()) != self.gpus:
            raise ConfigError(
                f"{_listed(sizes)} needs {_product(sizes.values())} GPUs, but resources.gpu is {self.gpus} per worker; "
                "leave tensor-parallel-size out (it follows resources.gpu), or make them agree"
            )
        return sizes

    def _kv_transfer(self, given: Any) -> dict[str, Any]:
        """NixlConnector for this end, with what the section says laid over it."""
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"kv-transfer-config must be a mapping, not {given!r}")
        # `fail`: the request ends at once, and the worker prefills it locally. `recompute` takes seconds to notice.
        config: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": f"kv_{self.transfer}",
            "kv_load_failure_policy": "fail",
            **(given or {}),
        }
        extra = config.get("kv_connector_extra_config") or {}
        lease_s = float(extra.get("kv_lease_duration", KV_LEASE_S)) if isinstance(extra, Mapping) else KV_LEASE_S
        if self.transfer in ("consumer", "both") and self.kv_pull_timeout_s >= lease_s:
            raise ConfigError(
                f"kv-pull-timeout-s is {self.kv_pull_timeout_s:g}, but the KV is kept for {lease_s:g} s only: past "
                "that wrong KV would be pulled; lower it, or raise kv_lease_duration on both sides"
            )
        return config


def words_of(args: Mapping[str, Any]) -> list[str]:
    """Arguments as a command line has them; keys in either spelling."""
    return [word for name, value in args.items() for word in _words(name, value)]


def _words(name: str, value: Any) -> Iterator[str]:
    option = f"--{_hyphened(name)}"
    if value is None:
        return
    if isinstance(value, bool):
        yield option if value else f"--no-{_hyphened(name)}"
    elif isinstance(value, Mapping):
        yield option
        yield json.dumps(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield option
        yield from (json.dumps(item) if isinstance(item, Mapping) else str(item) for item in value)
    else:
        yield f"{option}={value}"  # one word: a value may begin with a hyphen


def _hyphened(name: str) -> str:
    return name.replace("_", "-")


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{_hyphened(name)} must be a whole number of at least 1, not {value!r}")
    return value


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _listed(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{_hyphened(name)} {size}" for name, size in sizes.items())
