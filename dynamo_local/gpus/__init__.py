"""The devices of this host: inventory, topology, locks, and the pool that hands them out."""
