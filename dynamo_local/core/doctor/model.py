"""Checks of a model's folder. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.core.doctor.findings import Check, Results, faults_or_ok, ok, problem, warning
from dynamo_local.core.doctor.host import size_text


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder as it was read. `fault`: why nothing could be read.

    `config_fault` and `tokenizer_fault` say what is wrong with these files. `weights`: sound files. `missing`: files
    that the index names and that are not there. `damaged`: file and what is wrong with it.
    """

    path: str
    fault: str | None = None
    architecture: str = ""
    config_fault: str | None = None
    weights: Sequence[str] = ()
    weights_bytes: int = 0
    missing: Sequence[str] = ()
    damaged: Sequence[tuple[str, str]] = ()
    gguf: Sequence[str] = ()
    tokenizer_fault: str | None = None
    chat_template: bool = True


Models = Sequence[ModelFolder]


def model_folder(models: Models) -> Results:
    """The folder of `--model` is there and can be read."""
    for model in models:
        if model.fault is None:
            yield ok("it can be read", model.path)
        else:
            yield problem(
                model.fault, "name the folder with its config.json; `hf download MODEL` makes one", model.path
            )


def model_config(models: Models) -> Results:
    """`config.json` is there and names the model's architecture. Engines choose their code by it."""
    for model in _readable(models):
        if model.config_fault is None:
            yield ok(f"config.json: {model.architecture}", model.path)
        else:
            yield problem(
                model.config_fault, f"copy config.json anew: hf download MODEL --local-dir {model.path}", model.path
            )


def model_weights(models: Models) -> Results:
    """All files of weights are there and whole, as the index and the headers of the safetensors files say."""
    for model in _readable(models):
        again = f"finish the download: hf download MODEL --local-dir {model.path}"
        faults = [problem(f"{name}: {why}", again, model.path) for name, why in model.damaged]
        if model.missing:
            faults.append(problem(f"missing: {', '.join(model.missing)}", again, model.path))
        if not (faults or model.weights) and model.gguf:
            repair = "serve it by llama.cpp's server with `runtime: http` (docs/http-runtime.md)"
            faults.append(problem(f"it has GGUF files only: {', '.join(model.gguf)}", repair, model.path))
        elif not (faults or model.weights):
            faults.append(problem("it has no *.safetensors files", again, model.path))
        size = size_text(model.weights_bytes)
        yield from faults_or_ok(faults, f"{model.path}: {len(model.weights)} files of weights, {size}, are whole")


def model_tokenizer(models: Models) -> Results:
    """The tokenizer is there and can be read. The Processor makes token ids with it."""
    for model in _readable(models):
        if model.tokenizer_fault is None:
            yield ok("tokenizer.json", model.path)
        else:
            yield problem(
                model.tokenizer_fault, f"copy it anew: hf download MODEL --local-dir {model.path}", model.path
            )


def model_chat_template(models: Models) -> Results:
    """The tokenizer has a chat template. Without one, `/v1/chat/completions` refuses; `/v1/completions` works."""
    for model in _readable(models):
        if model.chat_template:
            yield ok("there is a chat template", model.path)
        else:
            yield warning(
                "neither tokenizer_config.json nor chat_template.jinja has a chat template",
                "take the model's instruct variant, or put a chat_template.jinja into the folder",
                model.path,
            )


def _readable(models: Models) -> list[ModelFolder]:
    return [model for model in models if model.fault is None]


CHECKS: tuple[Check, ...] = (model_folder, model_config, model_weights, model_tokenizer, model_chat_template)
