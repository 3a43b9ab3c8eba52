"""Plugins of a planner that others have written: in this process, or as gRPC servers (`dynamo.planner.plugin.v1`)."""
