"""Everything about Kubernetes: a planner in a pod, the connector to a graph, export and import of manifests."""
