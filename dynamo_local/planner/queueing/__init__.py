"""A small queueing twin: which share of the requests keeps its targets with so many prefill and decode workers."""
