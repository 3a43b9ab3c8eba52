"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}` with the right status.

| What happened | Status | `type` | `Retry-After` |
|---|---|---|---|
| the request is wrong (`InvalidRequest`, a bad parameter, an over-long prompt) | 400 | invalid_request_error | |
| no API key, or one that is not known, where there are some | 401 | invalid_request_error | |
| the model was never served here | 404 | invalid_request_error | |
| the head or the body did not arrive in time | 408 | invalid_request_error | |
| the body is larger than `max_body_bytes` | 413 | invalid_request_error | |
| the body is not said to be JSON (`Content-Type`) | 415 | invalid_request_error | |
| the head is larger than 64 KiB | 431 | invalid_request_error | |
| full (`WorkerBusy`, `max_inflight`) | 429 | rate_limit_error | yes |
| the engine, or a handler, failed (`EngineError`, `RemoteError`) | 500 | server_error | |
| a worker was lost (`WorkerLost`, `StreamGap`, `KvTransferError`, `UpstreamError`) | 502 | server_error | |
| `NoWorkers`, `WorkerDraining`, `RequestCancelled`; no etcd or NATS | 503 | service_unavailable_error | yes |
| `DeadlineExceeded` | 504 | timeout_error | |

Source of the format: https://platform.openai.com/docs/guides/error-codes and the `openai` Python client, which
retries 408, 409, 429 and 5xx and honours `Retry-After`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_local import errors
from dynamo_local.components.limits import MAX_MODEL_SHOWN, shortened
from dynamo_local.components.models_view import Availability, ModelsView

RETRY_AFTER_S = 1
MODELS_SHOWN = 20
"""The default `Retry-After`: a new worker, or a free slot, is used within 50 ms."""

_BY_ERROR: tuple[tuple[type[errors.DynamoError], int, str], ...] = (
    (errors.InvalidRequest, 400, "invalid_request_error"),
    (errors.WorkerBusy, 429, "rate_limit_error"),
    (errors.NoWorkers, 503, "service_unavailable_error"),
    (errors.WorkerDraining, 503, "service_unavailable_error"),
    (errors.RequestCancelled, 503, "service_unavailable_error"),
    (errors.InfraUnavailable, 503, "service_unavailable_error"),
    (errors.DeadlineExceeded, 504, "timeout_error"),
    (errors.WorkerLost, 502, "server_error"),
    (errors.StreamGap, 502, "server_error"),
    (errors.KvTransferError, 502, "server_error"),
    (errors.UpstreamError, 502, "server_error"),
)
"""First match wins; whatever is not listed is a 500 `server_error`."""


ANTHROPICS = "/v1/messages"
"""Where the paths of Anthropic's API begin, whose errors have its format."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's type by status. A status that is not listed is an `invalid_request_error` or an `api_error`. `param`
and `code` are additions of ours. Source: https://docs.anthropic.com/en/api/errors (read 2025)."""


class ApiError(Exception):
    """An answer other than 200: what the client is told, and how."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers: dict[str, str] = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def body(self, path: str = "") -> bytes:
        """The JSON object in the format of the API that has this path, also fit for the `data:` of a server-sent
        event."""
        if path.startswith(ANTHROPICS):
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            error = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
            return msgspec.json.encode({"type": "error", "error": error})
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def bad_param(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400 for one parameter, which the message and `param` both name."""
    return ApiError(400, message, param=param, code=code)


def unauthorized(*, shown: bool) -> ApiError:
    """401; `shown`: there was a key, but it is none of ours."""
    message = (
        "The API key is not known here." if shown else "There is no API key: send it as `Authorization: Bearer KEY`."
    )
    challenge = 'Bearer realm="dynamo"' + (', error="invalid_token"' if shown else "")
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})


def model_not_found(model: str, served: Sequence[str] = (), absent: Sequence[str] = ()) -> ApiError:
    """404 for a model that nobody here has ever served. `served` names those that are served now, `absent` those that
    are known and have no worker."""
    shown = shortened(model, MAX_MODEL_SHOWN)  # a name of the client's, known to nobody
    parts = [
        f"{what}: {', '.join(f'`{name}`' for name in names[:MODELS_SHOWN])}"
        for what, names in (("served now", served), ("without a ready worker now", absent))
        if names
    ]
    there = "; ".join(parts) or "GET /v1/models lists those that are served now"
    message = f"The model `{shown}` does not exist here; {there}."
    return ApiError(404, message, param="model", code="model_not_found")


def no_model(models: ModelsView, name: str) -> ApiError:
    """The error for a model that nobody serves now: 503 for one that belongs here, else 404."""
    if models.availability(name) is Availability.GONE:
        return model_unavailable(name)
    return model_not_found(name, [each.name for each in models.models()], models.absent())


def model_unavailable(model: str) -> ApiError:
    """503 for a model that belongs here but has no ready worker at the moment."""
    return ApiError(
        503,
        f"The model `{model}` has no ready worker at the moment; try again shortly (see `dynamo status`).",
        type="service_unavailable_error",
        code=errors.NoWorkers.code,
        retry_after_s=RETRY_AFTER_S,
    )


def too_many_held(model: str, held: int, retry_after_s: int) -> ApiError:
    """503: the model has no worker, and as many requests for it are held as may be."""
    return _no_worker(f"The model `{model}` has no worker now, and {held} requests for it are held.", retry_after_s)


def not_served_in_time(model: str, held_s: float, retry_after_s: int) -> ApiError:
    """503: the request was held for as long as it may be."""
    return _no_worker(
        f"The model `{model}` had no worker within {held_s:.0f} s, its `max-wait-s`: other models hold the GPUs, or "
        "none could be started; see `dynamo status`.",
        retry_after_s,
    )


def model_removed(model: str) -> ApiError:
    """404: the request was held for a model that `dynamo apply` has removed, and no worker of it is left."""
    message = f"The model `{model}` was removed (`dynamo apply`) while this request waited for a worker of it."
    return ApiError(404, message, param="model", code="model_not_found")


def _no_worker(message: str, retry_after_s: int) -> ApiError:
    kind, code = "service_unavailable_error", "not_served"
    return ApiError(503, message, type=kind, code=code, retry_after_s=retry_after_s)


def too_many_requests(limit: int) -> ApiError:
    """429: this Frontend itself is full."""
    return _full(f"This Frontend already serves {limit} requests, its `max_inflight`; try again shortly.")


def too_many_bytes(limit: int) -> ApiError:
    """429: the bodies of all requests that are being served have come to the bound of this Frontend's memory."""
    return _full(f"This Frontend holds requests of {limit:,} bytes already; try again shortly.")


def _full(message: str) -> ApiError:
    code = errors.WorkerBusy.code
    return ApiError(429, message, type="rate_limit_error", code=code, retry_after_s=RETRY_AFTER_S)


def draining() -> ApiError:
    """503: this Frontend is leaving. The connection is closed so that a retry reaches another server."""
    return ApiError(
        503,
        "This Frontend is shutting down and takes no new requests.",
        type="service_unavailable_error",
        code=errors.WorkerDraining.code,
        retry_after_s=RETRY_AFTER_S,
        headers={"Connection": "close"},
    )


def from_error(error: Exception) -> ApiError:
    """The answer to a request that ended with this error.

    An exception that is not ours is named to the client by its class only: its text may hold secrets.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, errors.DynamoError):
        message = f"The server failed unexpectedly ({type(error).__name__}); its log has the details."
        return ApiError(500, message, type="server_error", code=errors.DynamoError.code)
    for cls, status, kind in _BY_ERROR:
        if isinstance(error, cls):
            return ApiError(
                status,
                error.message,
                type=kind,
                param=_text(error.details.get("param")),
                code=_text(error.details.get("code")) or error.code,
                retry_after_s=_retry_after_s(error) if status in (429, 503) else None,
            )
    return ApiError(500, error.message, type="server_error", code=error.code)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _retry_after_s(error: errors.DynamoError) -> int:
    """Whole seconds, as RFC 9110 wants them, never 0: a client would come back at once."""
    hint = error.details.get("retry_after_s")
    if isinstance(hint, int | float) and not isinstance(hint, bool) and math.isfinite(hint):
        return max(1, math.ceil(hint))
    return RETRY_AFTER_S
