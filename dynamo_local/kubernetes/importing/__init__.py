"""`dynamo import FILE`: files of other tools, and manifests, as a configuration for this host."""
