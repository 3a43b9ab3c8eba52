"""Disaggregated: PrefillWorkers compute prompts and hand the KV to the VllmWorkers, which decode."""

from dynamo_local.components import Frontend, PrefillWorker, Processor, VllmWorker

Frontend.link(Processor, colocate=True).link(VllmWorker).link(PrefillWorker)
