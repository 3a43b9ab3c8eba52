"""Where the cases run: vLLM's CPU build with a tiny model, or CUDA with one that the caller names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.drivers.served import Served

START_TIMEOUT_S = 590


@dataclass(frozen=True)
class VllmHost:
    """`args` are vLLM's own, for every worker; `env` is for all that is started; `gpus` is `Host: gpus`."""

    model: Path
    gpus: str
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        return int(self.args["block-size"])

    def vllm_serve(self, name: str) -> list[str]:
        """The words of `vllm serve` as a section's command, with that name in the API."""
        found = [
            "vllm",
            "serve",
            "{model}",
            "--host",
            "127.0.0.1",
            "--port",
            "{port:http}",
            "--served-model-name",
            name,
        ]
        for option, value in self.args.items():
            if isinstance(value, bool):
                found.append(f"--{option}" if value else f"--no-{option}")
            else:
                found += [f"--{option}", str(value)]
        return found

    def aggregated(
        self,
        folder: Path,
        *,
        planner: Mapping[str, Any] | None = None,
        router: str | None = None,
        words: Sequence[str] = (),
        **decode: Any,
    ) -> Served:
        """`graphs.agg` with real vLLM; `decode` are keys of the VllmWorker's section, `planner` is the Planner's.

        With a `router`, the graph that has the Router, and that policy. `words` are more ones of `dynamo serve`.
        """
        planned = {} if planner is None else {"Planner": dict(planner)}
        return self._served(folder, "agg", {"VllmWorker": self._worker(decode), **planned}, router, words)

    def disaggregated(
        self,
        folder: Path,
        *,
        router: str | None = None,
        workers: int = 1,
        prefill_workers: int | None = None,
        planner: Mapping[str, Any] | None = None,
        **decode: Any,
    ) -> Served:
        """`graphs.disagg`, so many `workers` of each role (and so many `prefill_workers`, if given), every prefill
        remote unless `decode` says otherwise. `planner` is the Planner's section."""
        decoding = {"remote-prefill": True, "ServiceArgs": {"workers": workers}, **decode}
        prefilling = {"ServiceArgs": {"workers": workers if prefill_workers is None else prefill_workers}}
        planned = {} if planner is None else {"Planner": dict(planner)}
        sections = {"VllmWorker": self._worker(decoding), "PrefillWorker": self._worker(prefilling), **planned}
        return self._served(folder, "disagg", sections, router)

    def _worker(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.args, **more, "common-configs": ["model", "served-model-name"]}

    def _served(
        self, folder: Path, graph: str, workers: Mapping[str, Any], router: str | None, words: Sequence[str] = ()
    ) -> Served:
        config = {
            "Common": {"model": str(self.model), "served-model-name": "tiny"},
            "Host": {"gpus": self.gpus},
            "Frontend": {"served-model-name": "tiny"},
            "Processor": {"common-configs": ["model", "served-model-name"]},
            **workers,
        }
        if router is not None:
            graph += "_router"
            config["Common"]["router"] = router
            config["Processor"] = config["Router"] = {"common-configs": ["model", "served-model-name", "router"]}
        file = folder / f"{graph}.yaml"
        file.write_text(yaml.safe_dump(config))
        target = (f"graphs.{graph}:Frontend", "-f", str(file))
        # For all of the graph: the Frontend's start includes that of the engines behind it.
        return Served(
            *words, "--start-deadline", str(START_TIMEOUT_S), target=target, env=self.env, timeout_s=START_TIMEOUT_S
        )


def cpu_host(model: Path) -> VllmHost:
    """Two cores and a few GiB are enough: one thread per engine, a small cache, no compilation."""
    return VllmHost(
        model,
        gpus="sim:8",
        args={
            "dtype": "float32",  # the CPU build's bfloat16 needs AMX
            "enforce-eager": True,
            "distributed-executor-backend": "uni",
            "block-size": 32,
            "num-gpu-blocks-override": 300,
            "kv-cache-memory-bytes": 64 * 1024 * 1024,
            "max-num-seqs": 16,
            "max-model-len": 4096,
            "enable-prefix-caching": False,  # what is transferred is counted: nothing must be there already
        },
        env={
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # torch and vLLM are thousands of files
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the CPU build takes `mp`, and one more process, for `uni`
            "OMP_NUM_THREADS": "1",
            # What vLLM has looked at once (its parser's answers, a model's class) is not looked at again.
            "VLLM_CACHE_ROOT": os.environ.get("DYN_VLLM_CACHE") or str(model.parent / "cache"),
            "UCX_TLS": "sm,tcp,self",
        },
    )


def cuda_host(model: Path) -> VllmHost:
    """Any model that fits one GPU; half the memory is left to whoever else uses the card."""
    return VllmHost(
        model,
        gpus=os.environ.get("DYN_VLLM_GPUS", "all"),
        args={
            "block-size": 16,
            "max-model-len": 4096,
            "max-num-seqs": 16,
            "gpu-memory-utilization": float(os.environ.get("DYN_VLLM_MEMORY", "0.5")),
            "enforce-eager": True,
            "enable-prefix-caching": False,
        },
        env={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Texts are compared: what a request gets must not depend on who is in the batch with it (Hopper and later).
            "VLLM_BATCH_INVARIANT": os.environ.get("VLLM_BATCH_INVARIANT", "1"),
        },
    )
