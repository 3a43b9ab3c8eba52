"""The prefill queue on JetStream, and how a prefill's result comes back. See `queue` for its guarantees."""

from dynamo_local.runtime.prefill_queue.entries import DeadLetter
from dynamo_local.runtime.prefill_queue.pulled import DEFAULT_ACK_WAIT_S, JetStreamPulledTask, keep_in_progress
from dynamo_local.runtime.prefill_queue.queue import CONSUMER, DEFAULT_MAX_DELIVER, JetStreamPrefillQueue
from dynamo_local.runtime.prefill_queue.replies import ExpectedReply, PrefillReplies

__all__ = [
    "CONSUMER",
    "DEFAULT_ACK_WAIT_S",
    "DEFAULT_MAX_DELIVER",
    "DeadLetter",
    "ExpectedReply",
    "JetStreamPrefillQueue",
    "JetStreamPulledTask",
    "PrefillReplies",
    "keep_in_progress",
]
