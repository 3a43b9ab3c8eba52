"""Words on the command line to sections, and how they are laid over others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.config.loading import deep_merge, normalise, parse_overrides
from dynamo_local.errors import ConfigError


@pytest.mark.parametrize(
    "words",
    [["--A.ServiceArgs.workers=2"], ["--A.ServiceArgs.workers", "2"], ["--A.ServiceArgs.workers", "=", "2"]],
)
def test_three_ways_to_write_a_value(words: list[str]) -> None:
    """With `=`, without, and with `=` as a word of its own, as Dynamo took it."""
    assert parse_overrides(words) == {"A": {"ServiceArgs": {"workers": 2}}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("0.5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ('"7"', "7"),
        ("007", "007"),
        ("NaN", "NaN"),
        ("1e999", "1e999"),
        ("a=b", "a=b"),
        ("", ""),
        ("meta/llama-3", "meta/llama-3"),
    ],
)
def test_values_are_json_where_they_parse_and_text_otherwise(text: str, value: Any) -> None:
    assert parse_overrides([f"--A.key={text}"]) == {"A": {"key": value}}


@pytest.mark.parametrize(("text", "value"), [("-1", -1), ("-0.5", -0.5), ("-1e-3", -0.001), ("-.5", "-.5")])
def test_negative_numbers_are_values_in_either_form(text: str, value: Any) -> None:
    """The predecessor refused any value that begins with a minus."""
    assert parse_overrides(["--A.key", text]) == {"A": {"key": value}}
    assert parse_overrides([f"--A.key={text}"]) == {"A": {"key": value}}


def test_flag_alone_is_true_also_before_another_option() -> None:
    assert parse_overrides(["--A.flag", "--A.other", "1", "--B.last"]) == {
        "A": {"flag": True, "other": 1},
        "B": {"last": True},
    }


def test_environment_variables_stay_text() -> None:
    assert parse_overrides(["--A.ServiceArgs.envs.N=1", "--A.ServiceArgs.envs.T=true", "--A.ServiceArgs.envs.E="]) == {
        "A": {"ServiceArgs": {"envs": {"N": "1", "T": "true", "E": ""}}}
    }


def test_later_words_win_and_mappings_merge() -> None:
    words = ["--A.x=1", '--A.opts={"a": 1, "b": 1}', "--A.opts.b=2", "--A.x=3"]

    assert parse_overrides(words) == {"A": {"x": 3, "opts": {"a": 1, "b": 2}}}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["stray"], "'stray'"),
        (["--A.x=1", "stray", "--A.y=2"], "'stray'"),
        (["-f"], "'-f'"),
        (["--"], "'--'"),
        (["--port", "1"], "'--port'"),
        (["--A.x", "="], "'--A.x'"),
        (["--.x=1"], "'--.x=1'"),
    ],
)
def test_a_wrong_word_is_named_and_never_loops(words: list[str], named: str) -> None:
    """A stray word looped for ever."""
    with pytest.raises(ConfigError, match=named):
        parse_overrides(words)


@given(st.lists(st.text(alphabet='-=.Aab1 {}"', max_size=12), max_size=6))
def test_any_words_end_in_sections_or_in_a_config_error(words: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        assert all(isinstance(section, dict) for section in parse_overrides(words).values())


def test_an_override_of_workers_keeps_resources() -> None:
    """Overrides replaced a whole ServiceArgs, dropping `resources`."""
    base = {"ServiceArgs": {"workers": 1, "resources": {"gpu": 2, "memory": "20Gi"}}}

    assert deep_merge(base, {"ServiceArgs": {"workers": 4, "resources": {"gpu": 1}}}) == {
        "ServiceArgs": {"workers": 4, "resources": {"gpu": 1, "memory": "20Gi"}}
    }
    assert base["ServiceArgs"]["workers"] == 1


def test_the_other_spelling_is_the_same_key_at_any_depth() -> None:
    base = normalise({"A": {"engine-options": {"block-size": 1}}}, "file")
    over = normalise(parse_overrides(["--A.engine_options.block_size=2"]), "words")

    assert deep_merge(base, over) == {"A": {"engine_options": {"block-size": 2}}}


def test_lists_and_plain_values_are_replaced() -> None:
    assert deep_merge({"a": [1, 2], "b": {"c": 1}}, {"a": [3], "b": 0}) == {"a": [3], "b": 0}


def test_normalise_changes_our_keys_and_nobody_elses() -> None:
    section = {
        "kv-transfer-config": {"kv-connector": "x"},
        "ServiceArgs": {"drain-deadline": 5, "start_deadline_s": 6, "envs": {"A_B": "c"}, "resources": {"gpu": 1}},
    }

    assert normalise({"My-Service": section}, "file") == {
        "My-Service": {
            "kv_transfer_config": {"kv-connector": "x"},
            "ServiceArgs": {
                "drain_deadline_s": 5,
                "start_deadline_s": 6,
                "envs": {"A_B": "c"},
                "resources": {"gpu": 1},
            },
        }
    }
