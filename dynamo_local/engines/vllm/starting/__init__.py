"""How vLLM's processes come up: modules imported beforehand, EngineCore forked off a spare, and who watches them."""
