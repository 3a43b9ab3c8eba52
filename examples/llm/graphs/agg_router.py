"""Aggregated, with KV-aware routing: a Router sends each prompt where most of it is cached."""

from dynamo_local.components import Frontend, Processor, Router, VllmWorker

Frontend.link(Processor, colocate=True).link(Router).link(VllmWorker)
