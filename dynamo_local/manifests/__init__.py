"""A host's graph as Dynamo's Kubernetes manifests, and the other way round. Values in, values out."""
