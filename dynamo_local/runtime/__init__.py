"""The data plane's plumbing: etcd leases and discovery, requests over NATS, response streams, the prefill queue."""
