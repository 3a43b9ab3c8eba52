"""The data plane: etcd leases and discovery, requests over NATS, response streams, the prefill queue."""
