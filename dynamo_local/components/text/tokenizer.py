"""Text to token ids: a local model folder's tokenizer and chat template. Never the network.

The folder is what Hugging Face publishes: `tokenizer.json` (required), `tokenizer_config.json`,
`chat_template.jinja`, `generation_config.json`, `config.json`. The template environment is that of
transformers' `apply_chat_template` (`utils/chat_template_utils.py`), so that published templates render the same. This
is an immutable sandbox with `trim_blocks`, `lstrip_blocks`, `raise_exception`, `tojson`, `strftime_now`, loop controls
and
the `{% generation %}` tag.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from dynamo_local.components.limits import nested_deeper, shortened
from dynamo_local.components.text.detokenizer import Detokenizer, TokenTable
from dynamo_local.components.text.model import TINY_FOLDER, TINY_MODEL
from dynamo_local.components.text.segments import SegmentCache, token_ids
from dynamo_local.errors import ConfigError, InvalidRequest

_PIECE = 64 * 1024
"""Characters of a long text that are counted together."""

_QUICK_BYTES_PER_TOKEN = 4
"""A text of at most this many bytes per token of the context is tokenised as a whole. Most prompts that fit are
shorter, and the others take a few tens of megabytes."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training masks; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration of a class attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> Template:
    """A chat template in the sandbox. Raises `jinja2.TemplateError` when it does not parse."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env.from_string(source)


def _text_of(content: Any, index: int) -> str:
    """A message's content as one string; text parts are joined by newlines, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"messages[{index}].content must be a string or a list of text parts", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            kind = shortened(str(kind))
            raise InvalidRequest(
                f"messages[{index}].content holds a part of type {kind!r}; this server takes text parts only",
                param="messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _call_for_template(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Templates expect a call's arguments as an object, OpenAI sends its JSON (vLLM turns it, too)."""
    function = call["function"]
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"messages[{index}].tool_calls: the arguments of {shortened(function['name'])!r} are not JSON: {error}",
            param="messages",
        ) from error
    if nested_deeper(arguments):
        raise InvalidRequest(f"messages[{index}].tool_calls: the arguments are nested too deeply", param="messages")
    return {**call, "function": {**function, "arguments": arguments}}


def flatten_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with every content a string; other keys (name, tool_calls, …) are kept for the template."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    flat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}] must be an object with a role", param="messages")
        flat.append({**message, "content": _text_of(message.get("content"), index)})
        if calls := message.get("tool_calls"):
            flat[-1]["tool_calls"] = [_call_for_template(call, index) for call in calls]
    return flat


class Tokenizer:
    """One model's tokenizer, chat template and end-of-sequence tokens. Safe to share between requests."""

    def __init__(self, rust: RustTokenizer, template: Template | None, specials: Mapping[str, str], name: str) -> None:
        self.name = name
        self._rust = rust
        self._template = template
        self._specials = dict(specials)
        self.eos_token_ids: tuple[int, ...] = ()
        self._segments = SegmentCache(rust)
        self._table = TokenTable(rust)
        self._whole_table: TokenTable | None = None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included; valid ids are below it."""
        return int(self._rust.get_vocab_size(with_added_tokens=True))

    def detokenizer(
        self, stop: Sequence[str] = (), min_tokens: int = 0, include_stop: bool = False, keep_special: bool = False
    ) -> Detokenizer:
        """A fresh incremental decoder for one response; `keep_special` writes special tokens, too."""
        table = self._table
        if keep_special:
            table = self._whole_table = self._whole_table or TokenTable(self._rust, keep_special=True)
        return Detokenizer(table, stop=stop, min_tokens=min_tokens, include_stop=include_stop)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, also of a special one. U+FFFD stands for a part of a character."""
        return str(self._rust.decode([token_id], skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text at once, by default with special tokens left out."""
        return str(self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text. Other threads run while something new is tokenised."""
        return (
            token_ids(self._rust, text, add_special_tokens=True) if add_special_tokens else self._segments.encode(text)
        )

    def surely_exceeds(self, text: str, tokens: int) -> bool:
        """Whether the text is longer than this many tokens. A text that is far too long is not tokenised as a whole:
        one of 8 MB takes half a minute, and a gigabyte. False if only tokenising can tell.

        Pieces are counted by themselves. If a token is cut in two the sum is too high by a few, so it must be twice
        as high as allowed.
        """
        if len(text.encode("utf-8", "replace")) <= max(_QUICK_BYTES_PER_TOKEN * tokens, _PIECE):
            return False
        count = 0
        for at in range(0, len(text), _PIECE):
            count += len(self.encode(text[at : at + _PIECE], add_special_tokens=False))
            if count > 2 * tokens:
                return True
        return False

    def render(self, messages: Any, tools: Any = None, template_kwargs: Mapping[str, Any] | None = None) -> str:
        """The prompt text of a chat. Raises `InvalidRequest` for what the template refuses."""
        if self._template is None:
            raise InvalidRequest(
                f"model {self.name} has no chat template; use /v1/completions, or put a chat_template.jinja "
                "into its folder",
                param="messages",
            )
        flat = flatten_messages(messages)
        # The caller's extras come first: they must not replace what the server decides.
        variables = {
            **(template_kwargs or {}),
            **self._specials,
            "messages": flat,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(variables)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    def encode_chat(
        self, messages: Any, tools: Any = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a chat. The template writes the special tokens itself, so none are added."""
        return self.encode(self.render(messages, tools, template_kwargs), add_special_tokens=False)

    def encode_prompt(self, prompt: Any) -> list[int]:
        """Token ids of a completions prompt: a string, a list of token ids, or a list of one of either.

        Raises `InvalidRequest` (`param="prompt"`) for anything else, for several prompts, and for ids
        outside the vocabulary.
        """
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._not_empty(self.encode(prompt))
        if isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            size = self.vocab_size
            for token in prompt:
                if not 0 <= token < size:
                    raise InvalidRequest(
                        f"prompt holds token id {token}; valid ids are 0 to {size - 1}", param="prompt"
                    )
            return self._not_empty(list(prompt))
        if isinstance(prompt, list) and len(prompt) > 1:
            raise InvalidRequest(
                f"prompt holds {len(prompt)} prompts; this server takes one prompt per request", param="prompt"
            )
        raise InvalidRequest("prompt must be a string or a list of token ids", param="prompt")

    @staticmethod
    def _not_empty(ids: list[int]) -> list[int]:
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return ids


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object of a model folder; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {path.parent}: {path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model folder {path.parent}: {path.name} must hold an object, not {type(value).__name__}")
    return value


def _special(value: Any) -> str | None:
    """A special token is written as a string or as `{"content": …}`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers; of several, the one named default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, Mapping)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _eos_ids(folder: Path, rust: RustTokenizer, eos_token: str | None) -> tuple[int, ...]:
    """generation_config.json, then config.json, then the tokenizer's eos token; all that are named, in order."""
    ids: list[int] = []
    for source in ("generation_config.json", "config.json"):
        value = _read_json(folder / source).get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        ids += [t for t in found if isinstance(t, int)]
        if ids:
            break
    token_id = rust.token_to_id(eos_token) if eos_token is not None else None
    if token_id is not None:
        ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def load_tokenizer(model: str | None) -> Tokenizer:
    """The tokenizer of a local folder, or the built-in tiny one for None and `sim-tiny`.

    Raises `ConfigError` that names the folder, the file and what to do.
    """
    builtin = model is None or model == TINY_MODEL
    folder = TINY_FOLDER if model is None or builtin else Path(model).expanduser()
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"model {model!r}: there is no {path}; give the path of a local folder that holds tokenizer.json "
            f"(nothing is downloaded), or {TINY_MODEL!r} for the built-in tokenizer"
        )
    try:
        rust = RustTokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception for everything
        raise ConfigError(f"model folder {folder}: tokenizer.json cannot be loaded: {error}") from error
    rust.no_padding()
    rust.no_truncation()
    config = _read_json(folder / "tokenizer_config.json")
    specials = {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and not name.startswith("add_") and (text := _special(value)) is not None
    }
    try:
        source = _template_source(folder, config)
        template = compile_template(source) if source is not None else None
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise ConfigError(f"model folder {folder}: the chat template cannot be used: {error}") from error
    tokenizer = Tokenizer(rust, template, specials, TINY_MODEL if model is None else model)
    tokenizer.eos_token_ids = _eos_ids(folder, rust, specials.get("eos_token"))
    return tokenizer
