"""Tests that a model's folder is found and read, and that a broken one is named in one line."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.config.model_folder import INDEX, find_model, read_model
from dynamo_local.errors import ConfigError
from tests.unit.core.test_model_facts import PLAIN


def tensors(path: Path, *sizes: int) -> None:
    """A safetensors file with tensors of so many bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for at, size in enumerate(sizes):
        header[f"t{at}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Model-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLAIN))
    tensors(folder / "model.safetensors", 100, 28)
    return folder


def test_the_bytes_of_the_weights_are_exact(model: Path) -> None:
    tensors(model / "second.safetensors", 72)
    read = read_model(str(model), {})
    assert (read.weights_bytes, read.name, read.facts.max_len) == (200, "Model-8B", 131072)


def test_an_index_names_the_files_that_count(model: Path) -> None:
    tensors(model / "copy.safetensors", 999)
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
    assert read_model(str(model), {}).weights_bytes == 128


def test_a_folder_without_weights_says_none(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert read_model(str(model), {}).weights_bytes is None


def test_the_hubs_cache_is_looked_into(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Org--Model-8B" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    for environ in ({"HF_HOME": str(tmp_path)}, {"HF_HUB_CACHE": str(tmp_path / "hub")}):
        read = read_model("Org/Model-8B", environ)
        assert (read.folder, read.name) == (snapshot, "Org/Model-8B")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("Org/Other", "hf download Org/Other"),
        ("nothing", "hf download ORGANISATION/NAME"),
        ("model.gguf", "llama-server -m model.gguf"),
        ("Model Q4.GGUF", "llama-server -m 'Model Q4.GGUF' --host"),
        (__file__, "is a file"),
        ("", "--model is empty"),
        (" ", "--model is empty"),
        ("../models", "hf download ORGANISATION/NAME"),
        ("x" * 5000, "cannot look there: File name too long"),
    ],
)
def test_a_model_that_is_not_here_is_answered_with_how_to_get_it(tmp_path: Path, given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_model(given, {"HF_HOME": str(tmp_path)})


def test_a_folder_of_gguf_files_is_refused_with_the_server_that_takes_them(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").touch()
    with pytest.raises(ConfigError) as refused:
        find_model(str(tmp_path), {})
    assert f"dynamo serve -- llama-server -m {tmp_path}/q4.gguf" in str(refused.value)
    assert "runtime: http" in str(refused.value)


def _cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _cut_header(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def _directory(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").mkdir()


def _dangling(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "blobs" / "gone")


def _fifo(name: str) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        (model / name).unlink()
        os.mkfifo(model / name)

    return spoil


def _layers(count: int) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": count}))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "config.json is no JSON"),
        (lambda model: (model / "config.json").write_text("[]"), "must hold a JSON object"),
        (lambda model: (model / "config.json").write_text('{"hidden_size": -1}'), "is -1|is missing"),
        (_fifo("config.json"), "config.json is no plain file"),
        (_fifo("model.safetensors"), "model.safetensors is no plain file"),
        (_dangling, "model.safetensors is a link to .*/blobs/gone, which is missing"),
        (_layers(10**400), "num_hidden_layers has 401 digits, and no model has more than"),
        (_layers(10**9), "num_hidden_layers is 1,000,000,000, and no model has more than"),
        (_directory, "cannot read .*config.json: Is a directory"),
        (_cut, r"model.safetensors is truncated: it has [\d,]+ of [\d,]+ bytes"),
        (_cut_header, "model.safetensors is truncated"),
        (lambda model: (model / "model.safetensors").write_bytes(b"<html>not found</html>"), "no safetensors file"),
        (
            lambda model: (model / INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}'),
            "gone.safetensors is missing",
        ),
        (lambda model: (model / INDEX).write_text("{}"), "has no weight_map"),
    ],
)
def test_a_broken_folder_is_one_line_that_names_the_file(model: Path, spoil: Any, words: str) -> None:
    spoil(model)
    with pytest.raises(ConfigError, match=words) as refused:
        read_model(str(model), {})
    assert "\n" not in str(refused.value)
