"""Dynamo's objects on Kubernetes: the fields that this project reads and writes."""
