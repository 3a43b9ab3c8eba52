"""etcd as a `ports.KeyValueStore`."""

from dynamo_local.runtime.etcd.connection import EtcdRefused, parse_endpoints
from dynamo_local.runtime.etcd.store import EtcdStore

__all__ = ["EtcdRefused", "EtcdStore", "parse_endpoints"]
