"""Aggregated, with KV-aware routing: a Router sends each prompt where most of it is cached."""

from dynamo_local.components.frontend import Frontend
from dynamo_local.components.processor import Processor
from dynamo_local.components.router import Router
from dynamo_local.components.vllm_worker import VllmWorker

Frontend.link(Processor, colocate=True).link(Router).link(VllmWorker)
