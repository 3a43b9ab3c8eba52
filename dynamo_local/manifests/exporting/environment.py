"""The variables of a service as those of its container: secrets by name only, and nothing that is this host's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_local.commands.dynamo_1x.env import DEFAULTS, OWNED
from dynamo_local.core.secrets import holds_secret, is_secret_variable
from dynamo_local.kubernetes.model import EnvVar, KeyRef, ValueFrom
from dynamo_local.manifests.notes import Kind, Note

NIXL_HOST, NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
POD_IP, POD_NAME = "status.podIP", "metadata.name"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OF_THE_HOST = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_SERVERS = ("ETCD_", "NATS_")


def secret_variable(name: str, secret: str) -> EnvVar:
    """A variable whose value is this key of that Secret."""
    return EnvVar(name=name, value_from=ValueFrom(secret_key_ref=KeyRef(name=secret, key=name)))


def field_variable(name: str, field_path: str) -> EnvVar:
    """A variable whose value is a field of the pod."""
    from_field: dict[str, Any] = {"fieldRef": {"fieldPath": field_path}}
    return EnvVar(name=name, value_from=ValueFrom.model_validate(from_field))


def pod_variables(envs: Mapping[str, str], where: str, secret: str) -> tuple[list[EnvVar], list[Note]]:
    """Variables for the container, and notes on those that are secrets, or that have no meaning in a pod.

    `secret` is the name of the Secret in which values are looked for that must not stand in a manifest.
    """
    variables, notes = [], []
    for name, value in envs.items():
        place = f"{where}.{name}"
        if name == NIXL_HOST and value in LOOPBACK:
            variables.append(field_variable(name, POD_IP))
            notes.append(
                Note(Kind.CHANGED, place, "the pod's own address in place of loopback: its peers are elsewhere")
            )
        elif (why := _only_here(name, value)) is not None:
            notes.append(Note(Kind.LEFT_OUT, place, why))
        elif value and (is_secret_variable(name) or holds_secret(value)):
            variables.append(secret_variable(name, secret))
            notes.append(Note(Kind.SECRET, place, f"its value is to be the key {name} of the Secret {secret}"))
        else:
            # `$(X)` would be another variable's value in a pod.
            variables.append(EnvVar(name=name, value=value.replace("$(", "$$(")))
    return variables, notes


def _only_here(name: str, value: str) -> str | None:
    """Why this variable is of this host alone; None if it is not."""
    if name in OWNED or name == NIXL_PORT:
        return "a port that no other process of this host has; in a pod every port is free"
    if name in OF_THE_HOST:
        return "Kubernetes gives each pod its GPUs"
    if name.startswith(_SERVERS):
        return "the operator tells its pods where discovery and events are"
    if value in LOOPBACK and (name in DEFAULTS or name.endswith("_HOST")):
        return "loopback: in a pod nobody would reach it"
    return None
