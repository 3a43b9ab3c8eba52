"""File, environment and command line to one Config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.config.loading import load_config
from dynamo_local.config.schema import HostConfig, ServiceArgs
from dynamo_local.config.yaml_text import parse_yaml
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.checks import SERVICE_ARG_KEYS, unknown_key


def write(folder: Path, text: str) -> Path:
    """A configuration file."""
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_an_empty_configuration() -> None:
    config = load_config(None, env={}, overrides=[])

    assert (dict(config.sections), config.host) == ({}, HostConfig())
    assert config.service("Frontend") == {}


def test_common_reaches_those_that_list_it_and_gives_way_to_their_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Common: {model: big, block-size: 64}\n"
        "A: {common-configs: [model, block_size], model: small}\n"
        "B: {common-configs: [block-size]}\nC:\n",
    )

    config = load_config(path, env={})

    assert config.service("A") == {"model": "small", "block_size": 64}
    assert config.service("B") == {"block_size": 64}
    assert config.service("C") == {}


def test_an_override_inside_a_common_mapping_keeps_its_other_keys(tmp_path: Path) -> None:
    """A part that is overridden does not take its neighbours along, wherever they came from."""
    path = write(tmp_path, "Common: {sim: {speed: 2, start-up-s: 1}}\nA: {common-configs: [sim]}\n")

    config = load_config(path, env={}, overrides=["--A.sim.start_up_s=5"])

    assert config.service("A") == {"sim": {"speed": 2, "start-up-s": 5}}


def test_the_variable_replaces_the_file_and_the_command_line_overrides_either(tmp_path: Path) -> None:
    """`DYN_DEPLOYMENT_CONFIG` is YAML text; Dynamo then ignored the command line."""
    path = write(tmp_path, "A: {x: file, y: file}\n")

    from_file = load_config(path, env={"DYN_DEPLOYMENT_CONFIG": " "}, overrides=["--A.x=words"])
    from_env = load_config(path, env={"DYN_DEPLOYMENT_CONFIG": "A: {x: env}"}, overrides=["--A.z=words"])

    assert from_file.service("A") == {"x": "words", "y": "file"}
    assert from_env.service("A") == {"x": "env", "z": "words"}


def test_a_missing_file_does_not_matter_where_the_variable_replaces_it(tmp_path: Path) -> None:
    assert load_config(tmp_path / "no.yaml", env={"DYN_DEPLOYMENT_CONFIG": "A: {}"}).sections == {"A": {}}


@pytest.mark.parametrize(
    ("gpus", "text"),
    [("sim:8", "sim:8"), ("[1, 2]", "1,2"), ("3", "3"), ("1,2,3", "1,2,3"), ("[GPU-a, GPU-b]", "GPU-a,GPU-b")],
)
def test_host_gpus_are_the_text_of_the_option(gpus: str, text: str, tmp_path: Path) -> None:
    assert (
        load_config(
            write(tmp_path, f"Host: {{gpus: '{gpus}'}}" if "[" not in gpus else f"Host: {{gpus: {gpus}}}"), env={}
        ).host.gpus
        == text
    )


def test_host_section_and_its_override(tmp_path: Path) -> None:
    path = write(
        tmp_path, "Host:\n  etcd-endpoints: [http://10.0.0.1:2379, 10.0.0.2:2379]\n  pass-env: [MY_VAR, 'X_*']\n"
    )

    host = load_config(path, env={}, overrides=["--Host.nats_server=nats://127.0.0.1:4222"]).host

    assert host.etcd_endpoints == "http://10.0.0.1:2379,10.0.0.2:2379"
    assert host.nats_server == "nats://127.0.0.1:4222"
    assert host.pass_env == ("MY_VAR", "X_*")


def test_worker_json_holds_merged_sections_without_host_and_envs(tmp_path: Path) -> None:
    """A service's `envs` may hold tokens, and this text goes to every worker and to the statefile."""
    path = write(
        tmp_path,
        "Host: {gpus: 'sim:2'}\nCommon: {model: m}\n"
        "A:\n  common-configs: [model]\n  api-key: s3cret\n  ServiceArgs: {workers: 2, envs: {HF_TOKEN: s3cret}}\n",
    )
    config = load_config(path, env={})

    sections = json.loads(config.service_config_json())

    assert sections == {
        "Common": {"model": "m"},
        "A": {"model": "m", "api_key": "s3cret", "ServiceArgs": {"workers": 2}},
    }
    assert "s3cret" not in config.service_config_json(masked=True)


def test_what_is_shown_has_no_secrets(tmp_path: Path) -> None:
    """`--dry-run` prints the merged configuration."""
    path = write(
        tmp_path,
        "Host: {nats_server: 'nats://user:s3cret@127.0.0.1:4222', gpus: 'sim:2'}\n"
        "A:\n  api-key: s3cret\n  tokenizer: tiny\n  max-num-batched-tokens: 8192\n"
        "  ServiceArgs: {envs: [{name: HF_TOKEN, value: s3cret}, {name: MODE, value: fast}]}\n",
    )

    shown = load_config(path, env={}).masked_sections()

    assert shown["Host"] == {"nats_server": "nats://****@127.0.0.1:4222", "gpus": "sim:2"}
    assert shown["A"] == {
        "api_key": "****",
        "tokenizer": "tiny",
        "max_num_batched_tokens": 8192,
        "ServiceArgs": {"envs": {"HF_TOKEN": "****", "MODE": "fast"}},
    }


def test_a_refused_address_does_not_show_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "Host: {nats_server: 'nats://user:s3cret@a b'}"), env={})

    assert "s3cret" not in str(caught.value)


def test_list_form_of_envs_merges_with_an_override(tmp_path: Path) -> None:
    """Dynamo writes envs as name and value."""
    path = write(tmp_path, "A: {ServiceArgs: {envs: [{name: X, value: '1'}, {name: Y, value: '1'}]}}\n")

    config = load_config(path, env={}, overrides=["--A.ServiceArgs.envs.Y=2"])

    assert config.service_args("A") == {"envs": {"X": "1", "Y": "2"}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:30", "12:30"),
        ("010", "010"),
        ("0x10", 16),
        ("-5", -5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("yes", True),
        ("~", None),
        ("1.2.3", "1.2.3"),
    ],
)
def test_yaml_without_its_surprises(text: str, value: Any) -> None:
    """YAML 1.1 would read a time as 750, a file mode as 8 and a date as an object that JSON does not know."""
    parsed = parse_yaml(f"A: {{x: {text}}}" if ":" not in text else f"A:\n  x: {text}\n", "c.yaml")["A"]["x"]

    assert parsed == value
    assert type(parsed) is type(value)


def test_merge_keys_work_and_are_no_duplicates() -> None:
    assert parse_yaml("A: &a {x: 1, y: 1}\nB: {<<: *a, y: 2}\n", "c")["B"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    "text", ["A: !!binary aGk=", "A:\n  - x: 1\n    x: 2", "a: b: c", "A: {x: !!set {a}}", "\x00", "--- 1\n--- 2"]
)
def test_other_broken_texts_are_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^c\.yaml: ") as caught:
        parse_yaml(text, "c.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "reason"), [(None, "Is a directory"), (b"A: \xff", "not UTF-8")])
def test_unreadable_files_are_named(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.mkdir() if content is None else path.write_bytes(content)

    with pytest.raises(ConfigError, match=rf"c\.yaml.*{reason}"):
        load_config(path, env={})


def test_further_files_are_laid_over_the_first_in_order(tmp_path: Path) -> None:
    texts = ("A: {x: 1, sim: {speed: 2.0}}", "A: {x: 2, sim: {start_up_s: 1.0}}", "B: {y: 3}")
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(text)
    config = load_config(paths[0], more=paths[1:], env={}, overrides=["--B.y=4"])
    assert config.sections == {"A": {"x": 2, "sim": {"speed": 2.0, "start_up_s": 1.0}}, "B": {"y": 4}}
    assert config.source == f"{paths[0]}, {paths[1]}, {paths[2]} and the command line"
    with pytest.raises(ConfigError, match=r"no configuration file .*none\.yaml"):
        load_config(paths[0], more=[tmp_path / "none.yaml"], env={})


def test_an_error_names_the_file_and_the_line_of_its_key(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("Host:\n  gpus: all\nA:\n  x: 1\n")
    second.write_text("Host:\n  restart:\n    failures-max: 3\n    frist-s: 1\n")
    with pytest.raises(ConfigError, match=r"/b\.yaml, line 4: Host: unknown key 'restart\.frist-s'"):
        load_config(first, env={}, more=(second,))
    with pytest.raises(ConfigError, match=r"^command line: Host: unknown key 'gpsu'; did you mean 'gpus'"):
        load_config(first, env={}, overrides=["--Host.gpsu=all"])
    first.write_text("Host: {}\nA:\n  common-configs: [model]\n")
    with pytest.raises(ConfigError, match=r"/a\.yaml, line 3: A: common-configs lists 'model'"):
        load_config(first, env={})


def test_each_field_of_service_args_is_known_where_it_stands_outside_of_it() -> None:
    """`VllmWorker: {standby: 1}` is told where it belongs."""
    assert ServiceArgs.model_fields.keys() == SERVICE_ARG_KEYS
    assert unknown_key("start-deadline-s", ["model"]).endswith("did you mean 'ServiceArgs.start-deadline-s'?")
