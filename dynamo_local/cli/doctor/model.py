"""Reads a model's folder: small JSON files, and the first bytes of each file of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynamo_local.components.text.tokenizer import load_tokenizer
from dynamo_local.core.doctor.model import ModelFolder
from dynamo_local.errors import ConfigError

JSON_BYTES_MAX = 64 * 1024 * 1024
HEADER_BYTES_MAX = 100_000_000
"""The largest header that the safetensors library reads."""
LFS_POINTER = b"version https://git-lfs"


def model_folder(folder: Path) -> ModelFolder:
    """The state of the folder. A broken one raises nothing: the result has its faults."""
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "there is no such folder"
        return ModelFolder(str(folder), fault=f"{why}; a model is given as a local folder")
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return ModelFolder(str(folder), fault=f"it cannot be read: {error.strerror}")
    config, config_fault = _json(folder / "config.json")
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if config_fault is None and not architecture:
        config_fault = "config.json names no architecture (`architectures`)"
    index, index_fault = _json(folder / "model.safetensors.index.json")
    mapped = index.get("weight_map")
    indexed = {str(name) for name in mapped.values()} if isinstance(mapped, dict) else set()
    files = sorted({name for name in names if name.endswith(".safetensors")} & (indexed or set(names)))
    faults = {name: _weights_fault(folder / name) for name in files}
    if index_fault is not None and (folder / "model.safetensors.index.json").exists():
        faults["model.safetensors.index.json"] = index_fault
    sound = tuple(name for name, why in faults.items() if why is None)
    return ModelFolder(
        str(folder),
        architecture=architecture,
        config_fault=config_fault,
        weights=sound,
        weights_bytes=sum((folder / name).stat().st_size for name in sound),
        missing=tuple(sorted(indexed - set(names))),
        damaged=tuple((name, why) for name, why in faults.items() if why is not None),
        gguf=tuple(name for name in names if name.endswith(".gguf")),
        tokenizer_fault=_tokenizer_fault(folder, names, config_fault),
        chat_template=_has_template(folder),
    )


def _json(path: Path) -> tuple[dict[str, Any], str | None]:
    """The object in the file, or why there is none."""
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            return {}, f"{path.name} is larger than {JSON_BYTES_MAX >> 20} MiB"
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, f"there is no {path.name}"
    except OSError as error:
        return {}, f"{path.name} cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return {}, f"{path.name} is not JSON: truncated, or a pointer of git-lfs"
    return (value, None) if isinstance(value, dict) else ({}, f"{path.name} is not a JSON object")


def _weights_fault(path: Path) -> str | None:
    """The fault of a safetensors file: eight bytes say the header's length, and the header says the data's."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                return "a pointer of git-lfs, not the file itself (`git lfs pull`)"
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > min(size - 8, HEADER_BYTES_MAX):
                return f"truncated: {size} bytes, less than its header"
            file.seek(8)
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        told = 8 + length + max(ends, default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "its header cannot be read"
    return None if size == told else f"{'truncated' if size < told else 'too long'}: {size} of {told} bytes"


def _tokenizer_fault(folder: Path, names: list[str], config_fault: str | None) -> str | None:
    if "tokenizer.json" not in names:
        other = [name for name in names if name.startswith("tokenizer") or name.endswith((".model", "vocab.json"))]
        beside = f", only {', '.join(other)}" if other else ""
        return f"there is no tokenizer.json{beside}"
    if config_fault is not None:  # the Processor reads it for the end-of-text token, and would say the same fault
        return _json(folder / "tokenizer.json")[1]
    try:
        load_tokenizer(str(folder))
    except ConfigError as error:
        return str(error)
    return None


def _has_template(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or bool(
        _json(folder / "tokenizer_config.json")[0].get("chat_template")
    )
