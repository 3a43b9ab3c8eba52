"""Disaggregated: PrefillWorkers compute prompts and hand the KV to the VllmWorkers, which decode."""

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.components.processor import Processor
from dynamo_local.components.vllm_worker import VllmWorker

Frontend.link(Processor, colocate=True).link(VllmWorker).link(PrefillWorker)
