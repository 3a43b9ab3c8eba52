"""Aggregated: every VllmWorker prefills and decodes."""

from dynamo_local.components import Frontend, Processor, VllmWorker

Frontend.link(Processor, colocate=True).link(VllmWorker)
