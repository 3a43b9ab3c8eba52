"""Prefills: on prefill workers, and decode workers' use of them."""
