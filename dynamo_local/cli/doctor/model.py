"""Reads a model's folder, with the readers that `serve --model` and the Processor use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_local.components.text.model import TINY_FOLDER, TINY_MODEL
from dynamo_local.components.text.tokenizer import load_tokenizer
from dynamo_local.config.model_folder import find_model, read_facts, read_weights
from dynamo_local.core.doctor.model import ModelFolder
from dynamo_local.errors import ConfigError


def model_folder(given: str, env: Mapping[str, str]) -> ModelFolder:
    """The state of the model's folder. A broken one raises nothing: the result has its faults."""
    simulated = given == TINY_MODEL
    try:
        folder = TINY_FOLDER if simulated else find_model(given, env)
    except ConfigError as error:
        fault = str(error).removeprefix(f"--model {given}").lstrip(": ")
        return ModelFolder(given, fault=fault, repair=error.details.get("repair"))
    found: dict[str, Any] = {"simulated": simulated}
    try:
        facts = read_facts(folder)
        found["config"] = f"{facts.architecture}, {facts.describe()}"
    except ConfigError as error:
        found["config_fault"] = str(error)
    try:
        found["weights_bytes"] = read_weights(folder)
    except ConfigError as error:
        found["weights_fault"] = str(error)
    try:
        load_tokenizer(str(folder))
    except ConfigError as error:
        # It reads config.json for the end-of-text token, and would say that file's fault again.
        if "config_fault" not in found or not (folder / "tokenizer.json").is_file():
            found["tokenizer_fault"] = str(error)
    return ModelFolder(given, **found, chat_template=_has_template(folder))


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))
