"""An engine's own API: hosted by the Processor, relayed by the Frontend. What it is made of: `engines.vllm.api`."""
