"""vLLM's own API over our data plane: all that depends on how vLLM's parts fit together is in this package.

`vllm serve` is three parts: HTTP and the serving classes; AsyncLLM, which turns prompts into `EngineCoreRequest`s and
`EngineCoreOutput`s into text; EngineCore, which computes. vLLM cuts between the second and the third, where its own
processes part. We cut at the same place: the Processor has the first two (`serving`, with `graph_core` in EngineCore's
place), the worker has the third (`core_requests`), and `wire` says what travels. So every option of every endpoint
that vLLM has is ours, and means the same.
"""
