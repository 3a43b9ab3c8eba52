"""Tests what a worker inherits, and what people are shown."""

from __future__ import annotations

import json

import pytest

from dynamo_local.core.secrets import MASK, allowed_env, mask_config, mask_env, mask_log, secret_values


def test_only_allow_listed_variables_reach_a_worker() -> None:
    """The manager's whole environment went to its workers."""
    allowed = (
        "PATH HOME LANG LC_ALL LD_LIBRARY_PATH CUDA_HOME NCCL_DEBUG UCX_TLS VLLM_X HF_HOME OMP_NUM_THREADS "
        "PYTHONPATH https_proxy HTTP_PROXY DYN_LOG ETCD_ENDPOINTS NATS_SERVER"
    )
    others = (
        "AWS_SECRET_ACCESS_KEY GITHUB_TOKEN SSH_AUTH_SOCK LANGUAGE MY_HOME path "
        "DYNAMO_SERVICE_CONFIG DYN_DEPLOYMENT_CONFIG"
    )

    assert list(allowed_env(dict.fromkeys(f"{allowed} {others}".split(), "x"))) == allowed.split()


def test_pass_env_adds_names_and_globs() -> None:
    environ = {"AWS_REGION": "a", "MY_A": "b", "MINE": "c", "PATH": "d"}

    assert allowed_env(environ, ["AWS_REGION", "MY_*"]) == {"AWS_REGION": "a", "MY_A": "b", "PATH": "d"}


def test_values_whose_names_hold_secrets_are_masked() -> None:
    """TOKEN, KEY, SECRET, PASSWORD, in any case and anywhere in the name."""
    environ = {
        "HF_TOKEN": "x",
        "api_key": "x",
        "MySecretThing": "x",
        "DB_PASSWORD_2": "x",
        "EMPTY_TOKEN": "",
        "MODE": "x",
    }

    assert mask_env(environ) == {
        "HF_TOKEN": MASK, "api_key": MASK, "MySecretThing": MASK, "DB_PASSWORD_2": MASK, "EMPTY_TOKEN": "", "MODE": "x",
    }  # fmt: skip


def test_credentials_inside_urls_and_json_are_masked() -> None:
    """`NATS_SERVER` and `DYNAMO_SERVICE_CONFIG` have innocent names."""
    section = {"A": {"api_key": "s3cret", "ServiceArgs": {"envs": {"HF_TOKEN": "s3cret"}}, "url": "http://u:s3cret@h/"}}

    masked = mask_env(
        {
            "NATS_SERVER": "nats://s3cret@h:4222,nats://u:s3cret@h:4223",
            "DYNAMO_SERVICE_CONFIG": json.dumps(section),
            "BRACE": "{not json http://u:s3cret@h",
        }
    )

    assert "s3cret" not in json.dumps(masked)
    assert masked["NATS_SERVER"] == "nats://****@h:4222,nats://****@h:4223"
    assert json.loads(masked["DYNAMO_SERVICE_CONFIG"])["A"]["url"] == "http://****@h/"


def test_words_that_merely_contain_a_secrets_name_are_shown() -> None:
    plain = {
        "tokenizer": "tiny",
        "max_num_batched_tokens": 8192,
        "token_low": 100,
        "keys": ["a"],
        "monkey": "b",
        "n": None,
    }

    assert mask_config(plain) == plain
    assert mask_config({"apiKey": "a", "password": 1234, "hf-token": "c"}) == dict.fromkeys(
        ("apiKey", "password", "hf-token"), MASK
    )


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("GET / Authorization: Bearer abc.def-1", "GET / Authorization: Bearer ****"),
        ("nats://me:pw@127.0.0.1:4222 is away", "nats://****@127.0.0.1:4222 is away"),
        ("HF_TOKEN=hunter2hunter2 vllm", "HF_TOKEN=**** vllm"),
        ('{"api_key": "hunter2hunter2", "n": 1}', '{"api_key": "****", "n": 1}'),
        (f"pulled with hf_{'a' * 30}", "pulled with ****"),
        ("-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----\nready", "****\nready"),
        ("said once more: my-own-secret", "said once more: ****"),
        ("token 4711 of 5000 tokens, key=dynamo/workers", "token 4711 of 5000 tokens, key=dynamo/workers"),
    ],
)
def test_a_log_shows_no_secret(text: str, masked: str) -> None:
    assert mask_log(text, secret_values({"MY_SECRET": "my-own-secret", "A_KEY": "1"})) == masked
