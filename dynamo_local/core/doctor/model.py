"""Checks of a model's folder. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.core.doctor.findings import Check, Results, ok, problem, warning
from dynamo_local.core.doctor.host import size_text


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder as it was read. `given`: the word of the command line. `fault`: why nothing could be read;
    `repair` puts that right. `simulated`: the sim engine's own, which has no weights.

    `config`: what config.json says, in words. `config_fault`, `weights_fault`, `tokenizer_fault`: faults of these
    files. `weights_bytes`: None without safetensors files.
    """

    given: str
    fault: str | None = None
    repair: str | None = None
    simulated: bool = False
    config: str = ""
    config_fault: str | None = None
    weights_bytes: int | None = None
    weights_fault: str | None = None
    tokenizer_fault: str | None = None
    chat_template: bool = True


Models = Sequence[ModelFolder]

AGAIN = "hf download MODEL --local-dir FOLDER"


def model_folder(models: Models) -> Results:
    """The model of `--model` is here: a folder, or a name of the hub that lies in its cache."""
    for model in models:
        if model.fault is None:
            yield ok("it can be read", model.given)
        else:
            yield problem(model.fault, model.repair or AGAIN, model.given)


def model_config(models: Models) -> Results:
    """`config.json` is whole. `serve` counts memory by it, and engines choose their code by it."""
    for model in _readable(models):
        if model.config_fault is None:
            yield ok(f"config.json: {model.config}", model.given)
        else:
            yield problem(model.config_fault, AGAIN, model.given)


def model_weights(models: Models) -> Results:
    """All files of weights are there and whole, as the index and the headers of the safetensors files say."""
    for model in _readable(models):
        if model.weights_fault is not None:
            yield problem(model.weights_fault, AGAIN, model.given)
        elif model.simulated:
            yield ok("the simulated engine needs none", model.given)
        elif model.weights_bytes is None:
            yield problem("it has no *.safetensors files", AGAIN, model.given)
        else:
            yield ok(f"weights of {size_text(model.weights_bytes)} are whole", model.given)


def model_tokenizer(models: Models) -> Results:
    """The tokenizer is there and can be read. The Processor makes token ids with it."""
    for model in _readable(models):
        if model.tokenizer_fault is None:
            yield ok("tokenizer.json can be read", model.given)
        else:
            yield problem(model.tokenizer_fault, AGAIN, model.given)


def model_chat_template(models: Models) -> Results:
    """The tokenizer has a chat template. Without one, `/v1/chat/completions` refuses; `/v1/completions` works."""
    for model in _readable(models):
        if model.chat_template:
            yield ok("there is a chat template", model.given)
        else:
            yield warning(
                "neither tokenizer_config.json nor chat_template.jinja has a chat template",
                "take the model's instruct variant, or put a chat_template.jinja into the folder",
                model.given,
            )


def _readable(models: Models) -> list[ModelFolder]:
    return [model for model in models if model.fault is None]


CHECKS: tuple[Check, ...] = (model_folder, model_config, model_weights, model_tokenizer, model_chat_template)
