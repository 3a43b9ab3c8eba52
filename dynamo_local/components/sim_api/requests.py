"""A request's extras, as they travel from a Frontend to a Processor. A plain request has none."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo_local.components import limits

Ids = Annotated[list[int], Meta(max_length=limits.MAX_PROMPT_IDS)]
Prompts = Annotated[list[str | Ids], Meta(max_length=limits.MAX_CHOICES)]


class FunctionTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema, none of them: no arguments."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | bool | None = None
    strict: bool | None = None


class Tools(msgspec.Struct, frozen=True, omit_defaults=True):
    """`name` is the one that must be called."""

    functions: Annotated[list[FunctionTool], Meta(min_length=1, max_length=limits.MAX_TOOLS)]
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None

    def for_template(self) -> list[dict[str, Any]]:
        """As OpenAI's list, which chat templates expect."""
        return [{"type": "function", "function": msgspec.to_builtins(function)} for function in self.functions]


class Form(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of the whole answer: a JSON schema, an expression that matches it, or one of several texts. `param`
    is the parameter that asked for it."""

    param: str
    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters that the sim engine takes, and that change nothing there."""

    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None


class Extras(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of them. `logprobs` is the number of alternatives at each token; None: no logprobs."""

    n: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] = 1
    prompts: Prompts | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    form: Form | None = None
    template: dict[str, Any] | None = None
    sampling: Sampling | None = None
    keep_special: bool = False
    include_stop: bool = False
