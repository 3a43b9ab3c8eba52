"""`dynamo serve`: infrastructure, GPU inventory, supervision, and each worker's entry point."""
