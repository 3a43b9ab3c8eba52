"""Prompts to ids: chat template as transformers renders it, and clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.components.text.model import TINY_FOLDER, TINY_TOKENS
from dynamo_local.components.text.tokenizer import flatten_messages, load_tokenizer
from dynamo_local.errors import ConfigError, InvalidRequest

TINY = load_tokenizer("sim-tiny")
HELLO = [{"role": "user", "content": "hello"}]


def folder_with(tmp_path: Path, config: dict[str, Any] | None = None, **files: str) -> str:
    """A model folder: the tiny tokenizer with another configuration and more files."""
    shutil.copy(TINY_FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return str(tmp_path)


def test_builtin_template_is_chatml() -> None:
    """The built-in chat template writes roles, ends of turns and the assistant's beginning."""
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert TINY.render(messages) == expected
    assert TINY.encode_chat(HELLO)[0] == 1  # <|im_start|> is one token, not text
    assert TINY.eos_token_ids == (2, 0)
    assert TINY.vocab_size == 2048


def test_ids_for_the_sim_engine_are_plain_text() -> None:
    """Each id that a simulated engine may give is visible text by itself, and no special token."""
    low, high = TINY_TOKENS
    assert high == TINY.vocab_size
    texts = [TINY.decode([token]) for token in range(low, high)]
    assert all(text and text.isascii() for text in texts)


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    """A list of text parts is text; an image is refused by name."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flatten_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    with pytest.raises(InvalidRequest, match="image_url") as caught:
        TINY.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert caught.value.details["param"] == "messages"


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], [{"role": "user", "content": 5}], None])
def test_bad_messages_are_refused(messages: Any) -> None:
    """Not a list, empty, no role, wrong content: each an InvalidRequest naming messages."""
    with pytest.raises(InvalidRequest) as caught:
        TINY.encode_chat(messages)
    assert caught.value.details["param"] == "messages"


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: [p]])
def test_prompts_as_text_and_as_ids(wrap: Any) -> None:
    """A string, a list of ids, and a list of one of either."""
    ids = TINY.encode("a prompt")
    assert TINY.encode_prompt(wrap("a prompt")) == TINY.encode_prompt(wrap(ids)) == ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(["a", "b"], "2 prompts"), ([1, 99999], "99999"), (7, "string"), ("", "empty"), ([], "empty"), ([True], "string")],
)
def test_bad_prompts_are_refused(prompt: Any, words: str) -> None:
    """Several prompts, ids outside the vocabulary, other types: refused, naming prompt."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        TINY.encode_prompt(prompt)
    assert caught.value.details["param"] == "prompt"


def test_template_refusal_is_an_invalid_request(tmp_path: Path) -> None:
    """`raise_exception` in a template is the user's error, with the template's words."""
    model = folder_with(tmp_path, chat_template__jinja="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        load_tokenizer(model).render(HELLO)


def test_template_is_sandboxed(tmp_path: Path) -> None:
    """A template cannot reach Python's internals or change its arguments."""
    for n, evil in enumerate(("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}")):
        (tmp_path / str(n)).mkdir()
        model = folder_with(tmp_path / str(n), chat_template__jinja=evil)
        with pytest.raises(InvalidRequest, match="refused"):
            load_tokenizer(model).render(HELLO)


def test_template_environment_is_that_of_transformers(tmp_path: Path) -> None:
    """tojson does not escape HTML, loop controls, the generation tag and strftime_now work, specials are there."""
    source = (
        "{% for m in messages %}\n  {% generation %}{{ m | tojson }}{% endgeneration %}{% break %}\n{% endfor %}\n"
        "{{ bos_token }}{{ strftime_now('%Y') | length }}{{ tools[0].name }}{{ add_generation_prompt }}{{ extra }}"
    )
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": True, "chat_template": "unused"}
    tokenizer = load_tokenizer(folder_with(tmp_path, config, chat_template__jinja=source))
    text = tokenizer.render([{"role": "user", "content": "<é>"}], [{"name": "f"}], {"extra": "!", "messages": []})
    assert text == '{"role": "user", "content": "<é>"}<s>4fTrue!'


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    """Of a list of templates the one named `default` is taken."""
    config = {"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]}
    assert load_tokenizer(folder_with(tmp_path, config)).render(HELLO) == "D"


def test_model_without_template_refuses_chats_only(tmp_path: Path) -> None:
    """Completions work; a chat is told why it does not."""
    tokenizer = load_tokenizer(folder_with(tmp_path))
    assert tokenizer.encode_prompt("x")
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render(HELLO)


def test_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    """generation_config.json's list and the tokenizer's own eos token, each once."""
    model = folder_with(tmp_path, {"eos_token": "<|im_end|>"}, generation_config__json='{"eos_token_id": [0, 5]}')
    assert load_tokenizer(model).eos_token_ids == (0, 5, 2)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(model).eos_token_ids == (9, 2)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    """No tokenizer.json: the error names the path and says that nothing is downloaded."""
    with pytest.raises(ConfigError, match="nothing is downloaded") as caught:
        load_tokenizer(str(tmp_path / "Qwen3"))
    assert str(tmp_path / "Qwen3" / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "[1]", "must hold an object"),
        ("generation_config.json", "{", "generation_config.json"),
        ("chat_template.jinja", "{% for %}", "chat template"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    """Each broken file is a ConfigError that names the folder and the file."""
    model = folder_with(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_tokenizer(model)
    assert str(tmp_path) in str(caught.value)
