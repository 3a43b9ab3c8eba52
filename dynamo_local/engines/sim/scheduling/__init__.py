"""What the simulated engine computes when: vLLM's scheduler and its KV blocks, without a clock or I/O."""
