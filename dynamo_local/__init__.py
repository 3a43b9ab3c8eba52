"""dynamo-local: a disaggregated LLM-serving graph on one multi-GPU host, without Kubernetes."""

__version__ = "0.1.0"
