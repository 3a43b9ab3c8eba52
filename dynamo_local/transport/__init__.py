"""How processes reach each other: etcd, NATS, requests and their answers, the prefill queue, KV events."""
