"""Aggregated: every VllmWorker prefills and decodes."""

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.processor import Processor
from dynamo_local.components.vllm_worker import VllmWorker

Frontend.link(Processor, colocate=True).link(VllmWorker)
