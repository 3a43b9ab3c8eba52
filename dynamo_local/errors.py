"""One tree of typed errors. Each says what happened, to what, and what to do next.

Two families:

* errors a *person* sees (`exit_code` is the process exit status; 2 means "your input"), and
* errors that travel *between components* with a response stream (`code` is their name on the wire;
  `retryable` says that sending the same request to another worker may succeed).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_RUNNING = 3
EXIT_BUSY = 4
EXIT_TIMED_OUT = 5


class DynamoError(Exception):
    """Base of every error this project raises on purpose. `str(error)` is fit to be shown to a person."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = EXIT_FAILED
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details


# --- bad input (exit code 2) -------------------------------------------------------------------


class BadInput(DynamoError):
    """Something the user wrote cannot be used; nothing was started or changed."""

    code = "bad_input"
    exit_code = EXIT_BAD_INPUT


class ConfigError(BadInput):
    """A configuration file, variable or override is wrong."""

    code = "config"


class GraphError(BadInput):
    """A graph cannot run: not importable, not a service, a dependency missing, names that clash."""

    code = "graph"


class GpuError(BadInput):
    """GPUs asked for cannot be given: too few, unknown, no driver, or held by somebody else."""

    code = "gpu"


# --- state of the host and of the running graph ------------------------------------------------


class StateError(DynamoError):
    """The statefile is missing, broken or not ours. The message names the file and the field."""

    code = "state"


class NotRunning(DynamoError):
    """No arbiter runs for the namespace (or it does not answer)."""

    code = "not_running"
    exit_code = EXIT_NOT_RUNNING


class NamespaceBusy(DynamoError):
    """Another `dynamo serve` holds the namespace."""

    code = "namespace_busy"
    exit_code = EXIT_BUSY


class StartTimedOut(DynamoError):
    """A worker did not become ready before its start deadline."""

    code = "start_timed_out"
    exit_code = EXIT_TIMED_OUT


class TimedOut(DynamoError):
    """The user's deadline passed. The action goes on."""

    code = "timed_out"
    exit_code = EXIT_TIMED_OUT


class WorkerDied(DynamoError):
    """A worker process ended while it was still needed."""

    code = "worker_died"


class InfraUnavailable(DynamoError):
    """etcd or NATS does not answer. Retry once it is back."""

    code = "infra_unavailable"
    retryable = True


class EtcdUnavailable(InfraUnavailable):
    """etcd does not answer within the deadline."""

    code = "etcd_unavailable"


class NatsUnavailable(InfraUnavailable):
    """NATS does not answer within the deadline."""

    code = "nats_unavailable"


class LeaseNotFound(DynamoError):
    """etcd does not know the lease: it was revoked, it expired, or etcd lost its data."""

    code = "lease_not_found"


# --- workers come and go -----------------------------------------------------------------------


class BadTarget(BadInput):
    """A number of workers, or a change of it, that cannot be read or makes no sense here."""

    code = "bad_target"


class UnknownWorker(BadInput):
    """No worker, or no component, of that name in this namespace; the message lists those there are."""

    code = "unknown_worker"


class TooManyWorkers(BadInput):
    """More workers than the service's class allows (a frontend listens on one port)."""

    code = "too_many_workers"


class NotEnoughGpus(GpuError):
    """Too few free GPUs for another worker now; the message says who holds them. Retry when some are free."""

    code = "not_enough_gpus"
    retryable = True


class LastReadyWorker(DynamoError):
    """Without this worker its component could serve nothing; only `--force` takes it away."""

    code = "last_ready_worker"


class WorkerFaulted(DynamoError):
    """A worker failed too often; a person must look before more of its component are started."""

    code = "worker_faulted"


class BeingRestarted(DynamoError):
    """A restart or an apply is under way in the component: a planner takes none of its workers meanwhile."""

    code = "being_restarted"


class DrainNotCancellable(DynamoError):
    """The worker is not, or no longer, in a drain that can be taken back."""

    code = "drain_not_cancellable"


class NotEnoughMemory(DynamoError):
    """Too little main memory for what was asked; the message has the numbers."""

    code = "not_enough_memory"
    retryable = True


class NotSleepable(DynamoError):
    """The worker cannot be put to sleep: its engine or its configuration does not allow it, or its state."""

    code = "not_sleepable"


class NotWakeable(DynamoError):
    """The worker cannot be woken now: it does not sleep, or its GPUs are somebody else's."""

    code = "not_wakeable"
    retryable = True


class NotRestartable(DynamoError):
    """Nothing to restart under that name, or it is leaving for good."""

    code = "not_restartable"


class NotFlippable(DynamoError):
    """The worker cannot change its role (now); the message says why."""

    code = "not_flippable"


class FlipUnderWay(DynamoError):
    """The worker changes its role at this moment. Retry when it has."""

    code = "flip_under_way"
    retryable = True


class FlipNotCancellable(DynamoError):
    """The worker does not change its role, or has already done so."""

    code = "flip_not_cancellable"


class FlipFailed(DynamoError):
    """The worker could not take over its new role, and has stayed in the old one."""

    code = "flip_failed"


class NotApplicable(BadInput):
    """A deployment that a running graph cannot take over, with all reasons. Nothing has changed."""

    code = "not_applicable"

    @classmethod
    def because(cls, reasons: Sequence[str]) -> NotApplicable:
        """With one line for each reason."""
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        return cls(f"it cannot be applied, and nothing was changed:{lines}", reasons=list(reasons))


class DecisionUnreadable(DynamoError):
    """A planner's keys in etcd are no decision (yet): an impossible value, or the id is not written yet."""

    code = "decision_unreadable"
    retryable = True


# --- requests between components ---------------------------------------------------------------


class RequestError(DynamoError):
    """Base of the errors that a response stream can end with."""

    code = "request"


class InvalidRequest(RequestError):
    """The request itself is wrong. `details["param"]` names the offending parameter when there is one."""

    code = "invalid_request"


class NoWorkers(RequestError):
    """No instance of the component is registered."""

    code = "no_workers"
    retryable = True


class WorkerBusy(RequestError):
    """The worker, or every worker, is full. `details["retry_after_s"]` suggests when to come back."""

    code = "worker_busy"
    retryable = True


class WorkerDraining(RequestError):
    """The worker is leaving and took nothing; send the request to another one."""

    code = "worker_draining"
    retryable = True


class WorkerLost(RequestError):
    """The worker, or the connection to it, went away before the stream ended."""

    code = "worker_lost"
    retryable = True


class EngineDead(WorkerLost):
    """The worker's engine has ended by itself, and the worker goes with it."""

    code = "engine_dead"


class KillsWorkers(WorkerLost):
    """Workers were lost one after the other with this request. It may be what kills them, so no other one gets it."""

    code = "kills_workers"

    AFTER: ClassVar[int] = 2
    """The request ends after so many lost workers."""

    @classmethod
    def of(cls, count: int, workers: str, last: str) -> KillsWorkers:
        """`workers` were lost, the last one with the error `last`."""
        return cls(
            f"{count} {workers} were lost one after the other while they had this request, the last with: {last}. "
            "The request may be what kills them, so no other worker gets it."
        )


class NotContinuable(RequestError):
    """The engine cannot go on with an answer that another worker began as that worker would have."""

    code = "not_continuable"


class StreamGap(RequestError):
    """Frames of a response stream are missing or out of order; nothing after the gap was delivered."""

    code = "stream_gap"
    retryable = True


class DeadlineExceeded(RequestError):
    """The request's deadline passed."""

    code = "deadline_exceeded"


class RequestCancelled(RequestError):
    """The caller went away."""

    code = "cancelled"


class KvTransferError(RequestError):
    """A KV hand-off failed: unknown identity, expired lease, or the prefill worker is gone."""

    code = "kv_transfer"
    retryable = True


class EngineError(RequestError):
    """The engine failed while computing."""

    code = "engine"


class UpstreamError(RequestError):
    """An HTTP server behind a worker failed (5xx). `details["answer"]` holds its `status`, `headers` and `body`."""

    code = "upstream"
    retryable = True


class RemoteError(RequestError):
    """The handler raised something that is not one of our errors; `details["type"]` is its class name."""

    code = "remote"


def _walk(cls: type[DynamoError]) -> dict[str, type[DynamoError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_walk(sub))
    return found


def to_wire(error: BaseException) -> dict[str, Any]:
    """`{"code", "message", "details"}` for a response stream; a foreign exception becomes `remote`."""
    if isinstance(error, DynamoError):
        return {"code": error.code, "message": error.message, "details": error.details}
    return {
        "code": RemoteError.code,
        "message": str(error) or type(error).__name__,
        "details": {"type": type(error).__name__},
    }


def from_wire(wire: Mapping[str, Any]) -> DynamoError:
    """The inverse of `to_wire`. An unknown code (a newer peer) becomes `RemoteError` that names it."""
    details = {str(k): v for k, v in dict(wire.get("details") or {}).items() if k != "message"}
    message = str(wire.get("message") or "no message")
    cls = _walk(DynamoError).get(str(wire.get("code")))
    if cls is None:
        return RemoteError(message, **{"type": str(wire.get("code")), **details})
    return cls(message, **details)


# --- extras
# How an extra that is missing comes in, as every message says it. The package is on no index.


def how_to_install(extra: str) -> str:
    """The command, and where."""
    return f"`pip install '.[{extra}]'` in your clone of dynamo-local"
