"""The costs of dynamo-local, measured: `python -m benchmarks [--short] [--json] [NAME…]`. See docs/benchmarks.md."""
