"""The policies: `load`, `sla`, `slo` and `throughput-load`. Pure."""
