"""The simulated engine: real scheduling and KV bookkeeping, computed tokens, modelled time. See docs/sim-engine.md."""
