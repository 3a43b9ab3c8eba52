"""etcd and NATS: their binaries, and the servers that a run starts for itself."""
