"""What dynamo-local costs, measured: `python -m benchmarks [--short] [--json] [NAME…]`. See docs/benchmarks.md."""
