"""Disaggregated, with KV-aware routing: what a Router knows to be cached is not prefilled again, here or there."""

from dynamo_local.components import Frontend, PrefillWorker, Processor, Router, VllmWorker

Frontend.link(Processor, colocate=True).link(Router).link(VllmWorker).link(PrefillWorker)
