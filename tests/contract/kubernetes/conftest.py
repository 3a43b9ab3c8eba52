"""The API servers of this folder's suites."""

from tests.contract.kubernetes.kube_worlds import real_kube, world

__all__ = ["real_kube", "world"]
