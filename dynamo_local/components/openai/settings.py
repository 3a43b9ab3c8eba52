"""The Frontend's options: its section in the YAML file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FrontendConfig(BaseModel):
    """Options of the `Frontend` service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on. The API asks for no credentials: leave it on loopback unless the network "
        "is yours.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 takes any free one, shown by the status.")
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="The model expected here: while no worker serves it, requests for it get 503 (come back) "
        "rather than 404 (no such model).",
    )
    max_inflight: int = Field(default=1024, ge=1, description="Requests served at once; beyond it 429.")
    request_timeout_s: float = Field(default=600.0, gt=0, description="Deadline of one request, first byte to last.")
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, description="Largest request body; beyond it 413.")
