"""Each typed error has its status, its `type`, and a `Retry-After` where coming back helps."""

from __future__ import annotations

import json

import pytest

from dynamo_local import errors
from dynamo_local.components.openai.errors import ApiError, from_error


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry"),
    [
        (errors.InvalidRequest("too long"), 400, "invalid_request_error", "invalid_request", False),
        (errors.WorkerBusy("full"), 429, "rate_limit_error", "worker_busy", True),
        (errors.NoWorkers("none"), 503, "service_unavailable_error", "no_workers", True),
        (errors.WorkerDraining("leaving"), 503, "service_unavailable_error", "worker_draining", True),
        (errors.RequestCancelled("cut"), 503, "service_unavailable_error", "cancelled", True),
        (errors.NatsUnavailable("away"), 503, "service_unavailable_error", "nats_unavailable", True),
        (errors.EtcdUnavailable("away"), 503, "service_unavailable_error", "etcd_unavailable", True),
        (errors.DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded", False),
        (errors.WorkerLost("lost"), 502, "server_error", "worker_lost", False),
        (errors.StreamGap("gap"), 502, "server_error", "stream_gap", False),
        (errors.KvTransferError("kv"), 502, "server_error", "kv_transfer", False),
        (errors.EngineError("broken"), 500, "server_error", "engine", False),
        (errors.RemoteError("bug"), 500, "server_error", "remote", False),
    ],
)
def test_a_typed_error_becomes_openais(error: errors.DynamoError, status: int, kind: str, code: str, retry: bool):
    answer = from_error(error)
    assert answer.status == status
    assert ("Retry-After" in answer.headers) is retry
    assert json.loads(answer.body()) == {
        "error": {"message": error.message, "type": kind, "param": None, "code": code},
    }


def test_every_request_error_has_a_status():
    for cls in errors.RequestError.__subclasses__():
        assert 400 <= from_error(cls("x")).status <= 504


def test_the_parameter_and_code_that_a_worker_names_are_kept():
    answer = from_error(errors.InvalidRequest("too long", param="messages", code="context_length_exceeded"))
    assert (answer.param, answer.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("hint", "expected"), [(0.2, "1"), (2.1, "3"), (0, "1"), (-1, "1"), (None, "1"), ("x", "1"), (float("inf"), "1")]
)
def test_retry_after_is_whole_seconds_and_never_zero(hint: object, expected: str):
    """RFC 9110 knows no fractions; 0 would be an invitation to spin."""
    assert from_error(errors.WorkerBusy("full", retry_after_s=hint)).headers["Retry-After"] == expected


def test_a_foreign_exceptions_text_stays_inside():
    answer = from_error(ValueError("token=hunter2"))
    assert answer.status == 500
    assert "hunter2" not in answer.message
    assert "ValueError" in answer.message


def test_an_api_error_is_passed_through():
    error = ApiError(413, "large")
    assert from_error(error) is error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_paths_of_anthropics_api_have_its_format(status: int, kind: str):
    error = ApiError(status, "why", type="ours", param="stop", code="ours too")
    told = {"type": kind, "message": "why", "param": "stop", "code": "ours too"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert json.loads(error.body(path)) == {"type": "error", "error": told}
    assert json.loads(error.body("/v1/completions"))["error"]["type"] == "ours"
