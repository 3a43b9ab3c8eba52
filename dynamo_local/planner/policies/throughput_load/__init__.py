"""The policy `throughput-load`: Dynamo 1.x's throughput loop and load loop."""
