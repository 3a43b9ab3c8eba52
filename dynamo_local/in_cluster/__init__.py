"""The planner in a pod of a Kubernetes cluster, by itself: no arbiter, no workers of ours."""
