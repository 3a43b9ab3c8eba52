"""Disaggregated, with KV-aware routing: what a Router knows to be cached is not prefilled again, here or there."""

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.prefill_worker import PrefillWorker
from dynamo_local.components.processor import Processor
from dynamo_local.components.router import Router
from dynamo_local.components.vllm_worker import VllmWorker

Frontend.link(Processor, colocate=True).link(Router).link(VllmWorker).link(PrefillWorker)
