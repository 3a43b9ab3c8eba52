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
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert TINY.render(messages) == expected
    assert TINY.encode_chat(HELLO)[0] == 1  # <|im_start|> is one token, not text
    assert TINY.eos_token_ids == (2, 0)
    assert TINY.vocab_size == 2048


def test_ids_for_the_sim_engine_are_plain_text() -> None:
    low, high = TINY_TOKENS
    assert high == TINY.vocab_size
    texts = [TINY.decode([token]) for token in range(low, high)]
    assert all(text and text.isascii() for text in texts)


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flatten_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    with pytest.raises(InvalidRequest, match="image_url") as caught:
        TINY.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert caught.value.details["param"] == "messages"


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], [{"role": "user", "content": 5}], None])
def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TINY.encode_chat(messages)
    assert caught.value.details["param"] == "messages"


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: [p]])
def test_prompts_as_text_and_as_ids(wrap: Any) -> None:
    ids = TINY.encode("a prompt")
    assert TINY.encode_prompt(wrap("a prompt")) == TINY.encode_prompt(wrap(ids)) == ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(["a", "b"], "2 prompts"), ([1, 99999], "99999"), (7, "string"), ("", "empty"), ([], "empty"), ([True], "string")],
)
def test_bad_prompts_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        TINY.encode_prompt(prompt)
    assert caught.value.details["param"] == "prompt"


def test_template_refusal_is_an_invalid_request(tmp_path: Path) -> None:
    model = folder_with(tmp_path, chat_template__jinja="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        load_tokenizer(model).render(HELLO)


def test_template_is_sandboxed(tmp_path: Path) -> None:
    for n, evil in enumerate(("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}")):
        (tmp_path / str(n)).mkdir()
        model = folder_with(tmp_path / str(n), chat_template__jinja=evil)
        with pytest.raises(InvalidRequest, match="refused"):
            load_tokenizer(model).render(HELLO)


def test_template_environment_is_that_of_transformers(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}\n  {% generation %}{{ m | tojson }}{% endgeneration %}{% break %}\n{% endfor %}\n"
        "{{ bos_token }}{{ strftime_now('%Y') | length }}{{ tools[0].name }}{{ add_generation_prompt }}{{ extra }}"
    )
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": True, "chat_template": "unused"}
    tokenizer = load_tokenizer(folder_with(tmp_path, config, chat_template__jinja=source))
    text = tokenizer.render([{"role": "user", "content": "<é>"}], [{"name": "f"}], {"extra": "!", "messages": []})
    assert text == '{"role": "user", "content": "<é>"}<s>4fTrue!'


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]}
    assert load_tokenizer(folder_with(tmp_path, config)).render(HELLO) == "D"


def test_model_without_template_refuses_chats_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path))
    assert tokenizer.encode_prompt("x")
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render(HELLO)


def test_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    model = folder_with(tmp_path, {"eos_token": "<|im_end|>"}, generation_config__json='{"eos_token_id": [0, 5]}')
    assert load_tokenizer(model).eos_token_ids == (0, 5, 2)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(model).eos_token_ids == (9, 2)


def test_missing_folder_is_named(tmp_path: Path) -> None:
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
    model = folder_with(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_tokenizer(model)
    assert str(tmp_path) in str(caught.value)
