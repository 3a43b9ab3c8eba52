"""Planner plugins: Python objects, or gRPC servers that speak Dynamo's plugin protocol."""
