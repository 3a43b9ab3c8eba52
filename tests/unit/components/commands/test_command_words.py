"""The words of a command: split, and its placeholders filled in."""

from __future__ import annotations

import pytest

from dynamo_local.components.commands.launch import check, fill, port_names, words_of
from dynamo_local.components.commands.launch import programs as programs_of


def filled(*words: str, **ports: int) -> tuple[str, ...]:
    """For one worker."""
    return fill(words, namespace="dynamo", watcher="dynamo_W_1", model="tiny", ports=ports)


def test_a_string_is_split_as_by_a_shell() -> None:
    assert words_of("""vllm serve 'a model' --x={"a": 1}""") == ("vllm", "serve", "a model", "--x={a:", "1}")


def test_a_list_keeps_its_words_and_numbers_become_text() -> None:
    assert words_of(["serve", "--port", 8000, "--ratio", 0.5]) == ("serve", "--port", "8000", "--ratio", "0.5")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("", "empty"),
        ([], "empty"),
        ("'open", "cannot be split"),
        (["a", True], "no word"),
        (["a", {"b": 1}], "no word"),
        (7, "must be a string or a list"),
        (["a\0b"], "NUL"),
    ],
)
def test_what_is_no_command_is_refused_with_the_reason(command: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        words_of(command)


def test_every_placeholder_is_filled_in_wherever_it_stands() -> None:
    words = filled("--p={port:http}", "{namespace}/{watcher}", "{model}", "{port:http}{port:kv}", http=8000, kv=9000)
    assert words == ("--p=8000", "dynamo/dynamo_W_1", "tiny", "80009000")


@pytest.mark.parametrize(
    "text", ['{"kv_connector": "NixlConnector", "x": {"y": 1}}', "{}", "{{ messages }}", "{{model}}"]
)
def test_braces_of_json_and_templates_are_the_commands_own(text: str) -> None:
    check([text], model=None)
    assert filled(text) == (text,)


def test_ports_are_named_once_and_in_order() -> None:
    assert port_names(["{port:b}", "{port:a}-{port:b}", "{model}"]) == ("b", "a")


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("{gpu}", r"\{gpu\} is no placeholder; known: \{port:NAME\}, \{namespace\}, \{watcher\}, \{model\}"),
        ("{modle}", "did you mean {model}"),
        ("{port}", "must name its port"),
        ("{port:}", "must name its port"),
        ("{port:8000}", "must name its port"),
        ("{namespace:x}", "no placeholder"),
        ("{model}", "no `model:` in the section"),
    ],
)
def test_a_placeholder_that_cannot_be_filled_is_refused(word: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check([word], model=None)


@pytest.mark.parametrize(
    ("command", "programs"),
    [
        ("vllm serve m", ("vllm",)),
        ("env A=1 B={port:nixl} vllm serve m", ("env", "vllm")),
        ("/usr/bin/env A=1 vllm", ("/usr/bin/env", "vllm")),
        ("env A=1", ("env",)),
        ("env -u A vllm", ("env",)),
        ("{model}/serve x", ()),
        ("env A=1 {model}/serve", ("env",)),
    ],
)
def test_the_programs_of_a_command_are_looked_for_before_it_is_started(command: str, programs: tuple[str, ...]) -> None:
    """Also the one behind `env`, which would start, and end with 127."""
    assert programs_of(words_of(command)) == programs
