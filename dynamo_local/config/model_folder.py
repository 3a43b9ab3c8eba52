"""Finds a model's folder and reads it: `config.json`, and the headers of its safetensors files. Nothing is downloaded.

A model is a folder, or a name such as `Qwen/Qwen3-8B` whose snapshot lies in the cache of Hugging Face's hub.
Errors name the file and say what to do next.
"""

from __future__ import annotations

import json
import re
import shlex
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.core.model_facts import BadModelConfig, ModelFacts, model_facts, tensor_bytes
from dynamo_local.errors import ConfigError

HEADER_MAX_BYTES = 100_000_000
"""The format's own bound on a header."""
JSON_MAX_BYTES = 64 << 20
INDEX = "model.safetensors.index.json"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was read. `given`: the word of the command line. `weights_bytes`: None without safetensors files."""

    given: str
    folder: Path
    facts: ModelFacts
    weights_bytes: int | None

    @property
    def name(self) -> str:
        """For the API: the hub's name, else the folder's."""
        return self.given if _HUB_NAME.fullmatch(self.given) and not Path(self.given).is_dir() else self.folder.name


def read_model(given: str, environ: Mapping[str, str], kv_dtype: str = "auto") -> Model:
    """The model of that folder, or of that name in the hub's cache. Raises `ConfigError`."""
    return read_folder(find_model(given, environ), given, kv_dtype)


def read_folder(folder: Path, given: str, kv_dtype: str = "auto") -> Model:
    """Reads a model's folder. Raises `ConfigError`."""
    return Model(given, folder, read_facts(folder, kv_dtype), read_weights(folder))


def read_facts(folder: Path, kv_dtype: str = "auto") -> ModelFacts:
    """The facts of the folder's `config.json`. Raises `ConfigError`."""
    path = folder / "config.json"
    config = _json(path)
    separate = folder / "hf_quant_config.json"
    try:
        return model_facts(config, _json(separate) if separate.is_file() else None, kv_dtype)
    except BadModelConfig as error:
        raise ConfigError(f"{path}: {error}; take a whole copy of the model") from None


# --- the folder ------------------------------------------------------------------------------------


def find_model(given: str, environ: Mapping[str, str]) -> Path:
    """The folder of a model. Raises `ConfigError` for a GGUF file, and for a model that is not here."""
    try:
        return _find(given, environ)
    except OSError as error:  # no permission, a name that is too long
        raise ConfigError(f"--model {given}: cannot look there: {error.strerror or error}") from None


def _find(given: str, environ: Mapping[str, str]) -> Path:
    if not given.strip():
        raise ConfigError("--model is empty; name a folder, or a model of the hub's cache, such as Qwen/Qwen3-8B")
    path = Path(given).expanduser()
    if path.suffix.lower() == ".gguf":
        raise _gguf(path)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise _no_config(path)
        return path.resolve()
    if path.exists():
        raise ConfigError(f"--model {given} is a file; name the folder that holds its config.json")
    if not _HUB_NAME.fullmatch(given):
        raise ConfigError(
            f"--model {given}: there is no such folder; name one with a config.json, or download a model: "
            "hf download ORGANISATION/NAME --local-dir FOLDER"
        )
    cache = hub_cache(environ)
    found = _snapshot(cache / f"models--{given.replace('/', '--')}")
    if found is None:
        raise ConfigError(
            f"--model {given}: there is no such folder, and the hub's cache {cache} has no such model; "
            f"download it: hf download {given} (HF_HOME and HF_HUB_CACHE move the cache)",
            repair=f"hf download {given}",
        )
    return found


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Where Hugging Face's hub keeps its models, by its own variables."""
    if cache := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = environ.get("HF_HOME")
    if home is None:
        home = str(Path(environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(home).expanduser() / "hub"


def _snapshot(repository: Path) -> Path | None:
    """The snapshot of `main`, else the newest that has a config."""
    try:
        main = repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="ascii").strip()
        if (main / "config.json").exists():
            return main
    except (OSError, UnicodeDecodeError):
        pass
    try:
        snapshots = [path for path in (repository / "snapshots").iterdir() if (path / "config.json").exists()]
        return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def _no_config(folder: Path) -> ConfigError:
    files = sorted(folder.glob("*.gguf"))
    if files:
        return _gguf(files[0])
    return ConfigError(
        f"{folder} has no config.json, so it is no model's folder; download one: "
        "hf download ORGANISATION/NAME --local-dir FOLDER"
    )


def _gguf(path: Path) -> ConfigError:
    line = f"dynamo serve -- llama-server -m {shlex.quote(str(path))} --host 127.0.0.1 --port '{{port:http}}'"
    return ConfigError(
        f"{path} is a GGUF file, which llama.cpp's server serves: {line} "
        "(in a file: `runtime: http`, docs/http-runtime.md)",
        repair=line,
    )


# --- files -----------------------------------------------------------------------------------------


def _check_plain(path: Path) -> None:
    """Raises `ConfigError`. A FIFO would be waited for without end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is no plain file; download the model again")


def _json(path: Path) -> dict[str, Any]:
    _check_plain(path)
    try:
        with path.open("rb") as file:
            text = file.read(JSON_MAX_BYTES + 1)
        found = json.loads(text) if len(text) <= JSON_MAX_BYTES else None
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; download the model again") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}; download the model again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object; download the model again")
    return found


def read_weights(folder: Path) -> int | None:
    """Bytes of all tensors, by the headers of the files that the index names, else of all. Raises `ConfigError`."""
    index = folder / INDEX
    if index.exists():
        files = _json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ConfigError(f"{index} has no weight_map; download the model again")
        names = sorted(set(files.values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        # Mistral's own format lies beside the same weights in the usual one.
        names = [name for name in names if not name.startswith("consolidated")] or names
    return sum(_data_bytes(folder / name) for name in names) if names else None


def _data_bytes(path: Path) -> int:
    """Bytes of the tensors in one file, compared with the file's length. Raises `ConfigError`."""
    _check_plain(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else HEADER_MAX_BYTES + 1
            if length > HEADER_MAX_BYTES:
                raise ConfigError(f"{path} is no safetensors file (its first 8 bytes); download it again")
            text = file.read(length)
    except FileNotFoundError:
        why = f"is a link to {path.readlink()}, which is missing" if path.is_symlink() else ""
        raise ConfigError(f"{path} {why or f'is missing, but {INDEX} names it'}; download the model again") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        header = json.loads(text) if len(text) == length else None
        data = tensor_bytes(header) if isinstance(header, dict) else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its header cannot be read: {error}; download it again") from None
    if data is None or size != 8 + length + data:
        expected = "" if data is None else f" of {8 + length + data:,}"
        raise ConfigError(f"{path} is truncated: it has {size:,}{expected} bytes; download it again")
    return data
