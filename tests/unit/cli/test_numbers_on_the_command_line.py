"""Durations that cannot be meant are refused with the option's name, before anything else happens."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dynamo_local.cli.main import cli
from dynamo_local.config.schema import ServiceArgs
from dynamo_local.errors import EXIT_BAD_INPUT

OPTIONS = [
    ("serve", "--start-deadline"),
    ("serve", "--drain-deadline"),
    ("down", "--timeout"),
    ("scale", "--timeout"),
    ("drain", "--timeout"),
    ("restart", "--timeout"),
    ("top", "--refresh"),
    ("simulate", "--start-up-s"),
]
ABSURD = ["nan", "-nan", "inf", "-inf", "-1", "1e300", "31536001", "ten", ""]


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_absurd_duration_is_refused_by_name(command: str, option: str, value: str) -> None:
    done = CliRunner().invoke(cli, [command, f"{option}={value}"])
    assert done.exit_code == EXIT_BAD_INPUT
    assert f"Invalid value for '{option}'" in done.output


@pytest.mark.parametrize("value", [-1, 0, 31536001, float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["start_deadline_s", "drain_deadline_s"])
def test_so_is_one_in_a_configuration(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        ServiceArgs.model_validate({key: value})
