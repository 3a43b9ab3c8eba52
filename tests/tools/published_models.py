"""Configs of published models, from the package `aiconfigurator-core` (Apache-2.0) where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "aiconfigurator_core"
FOLDER_ENV = "DYN_MODEL_CONFIGS"
"""A folder with the same files, where the package is not installed."""

FITS = (
    "meta-llama--Meta-Llama-3.1-8B",
    "meta-llama--Meta-Llama-3.1-70B",
    "Qwen--Qwen3-32B",
    "Qwen--Qwen3-30B-A3B",
    "Qwen--Qwen3-235B-A22B",
    "Qwen--Qwen3.5-27B",
    "Qwen--Qwen3.5-35B-A3B",
    "deepseek-ai--DeepSeek-V3",
    "deepseek-ai--DeepSeek-R1",
    "openai--gpt-oss-120b",
    "google--gemma-4-26B-A4B",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "XiaomiMiMo--MiMo-V2-Flash",
    "moonshotai--Kimi-K2-Instruct",
    "mistralai--Mixtral-8x7B-v0.1",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia--Nemotron-H-56B-Base-8K",
)
"""The models whose KV is compared with vLLM's."""


def folder() -> Path:
    """The folder of `NAME_config.json` files. Skips the test where there is none."""
    if given := os.environ.get(FOLDER_ENV):
        return Path(given)
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{PACKAGE} is not installed, and {FOLDER_ENV} names no folder")
    return Path(next(iter(spec.submodule_search_locations))) / "model_configs"


def names(configs: Path) -> list[str]:
    """The models in the folder."""
    paths = sorted(configs.glob("*_config.json"))
    return [path.name.removesuffix("_config.json") for path in paths if not path.name.endswith("_hf_quant_config.json")]


def config(configs: Path, name: str) -> dict[str, Any]:
    """The model's config.json."""
    found: dict[str, Any] = json.loads((configs / f"{name}_config.json").read_text(encoding="utf-8"))
    return found


def quantisation(configs: Path, name: str) -> dict[str, Any] | None:
    """NVIDIA's hf_quant_config.json beside it; None where there is none."""
    path = configs / f"{name}_hf_quant_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
