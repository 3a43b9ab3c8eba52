"""The Frontend's options: its section in the YAML file."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dynamo_local.components.targets import LatencyTargets
from dynamo_local.core.secrets import parse_source
from dynamo_local.core.traffic import MAX_INFLIGHT, REQUEST_TIMEOUT_S

_Name = Annotated[str, Field(min_length=1)]
_ORIGIN = re.compile(r"\*|https?://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:\d{1,5})?", re.IGNORECASE)


def _source(text: str) -> str:
    return str(parse_source(text))


def _origins(value: Any) -> Any:
    items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) and _ORIGIN.fullmatch(i) for i in items):
        raise ValueError('must be a list of origins such as https://chat.example.org (without a path), or "*"')
    return tuple(items)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than `localhost` may be anybody's."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class SharedModel(BaseModel):
    """One of several models. The section `Models` writes this (docs/models.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    component: str
    """That of its workers."""
    max_wait_s: float = Field(gt=0)
    max_held: int = Field(ge=0)
    max_held_bytes: int = Field(ge=0)
    engine: str | None = None
    """That of its workers, for requests that come while it has none. None: a command."""


class FrontendConfig(LatencyTargets):
    """Options of the `Frontend` service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    WITHOUT_KEYS: ClassVar[str] = (
        "other machines can reach it, and there is no api-key; give one (api-key: file:PATH or env:NAME), listen on "
        "127.0.0.1, or say insecure: true (--insecure) if everybody who reaches it may use the GPUs"
    )

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on. One that others can reach wants `api-key`, or `insecure: true`.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 takes any free one, shown by the status.")
    served_model_name: _Name | list[_Name] | None = Field(
        default=None,
        description="The model expected here, or a list: while no worker serves it, requests for it get 503 (come "
        "back) rather than 404 (no such model).",
    )
    models: dict[str, SharedModel] = Field(
        default_factory=dict,
        description="Models that share the GPUs, by name: requests for one without a worker are held. The section "
        "`Models` writes this (docs/models.md).",
    )
    plain_requests: Literal["engine", "light"] = Field(
        default="light",
        description="The API for plain requests to a vLLM model. `light`: ours, for an eighth of the processor time. "
        "`engine`: vLLM's own, with all of its fields (docs/api.md).",
    )
    max_inflight: int = Field(
        default=MAX_INFLIGHT, ge=1, description="Requests served at once, waiting ones included; beyond it 429."
    )
    request_timeout_s: float = Field(
        default=REQUEST_TIMEOUT_S, gt=0, description="Deadline of one request, first byte to last."
    )
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, description="Largest request body; beyond it 413.")
    api_key: Annotated[str, AfterValidator(_source)] | None = Field(
        default=None,
        description="Where the keys are of which a client must show one: `file:PATH`, one a line, read again when it "
        "changes; or `env:NAME`, separated by commas. See docs/security.md.",
    )
    insecure: bool = Field(
        default=False, description="Listen beyond this machine although there is no `api-key`; also `--insecure`."
    )
    tls_cert: str | None = Field(
        default=None, min_length=1, description="PEM file of the certificate (and its chain): HTTPS. Needs `tls-key`."
    )
    tls_key: str | None = Field(
        default=None, min_length=1, description="PEM file of the certificate's private key, without a passphrase."
    )
    record_trace: str | None = Field(
        default=None,
        min_length=1,
        description="File for one line per request: lengths, hashes of blocks, times, worker, outcome, never text "
        "(docs/recording.md). A further Frontend adds its number: FILE_1.",
    )
    record_trace_max_bytes: int = Field(
        default=1 << 30, ge=1 << 20, description="Most bytes of the recording; a quarter of it is one file."
    )
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(_origins)] = Field(
        default=(),
        description='Origins whose web pages may call the API, such as `https://chat.example.org`; "*": all. '
        "Default: none.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls-cert", "tls-key") if self.tls_key is None else ("tls-key", "tls-cert")
            raise ValueError(f"{given} is given without {missing}; TLS needs both")
        if not is_loopback(self.host) and self.api_key is None and not self.insecure:
            raise ValueError(f"host {self.host!r}: {self.WITHOUT_KEYS}")
        return self
