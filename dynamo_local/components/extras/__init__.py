"""What a request may ask for beyond text: several choices, tools, JSON by a schema, logprobs, echo.

A plain request never comes here (`components.pipeline`). What the sim engine is to answer under a schema is made here,
as valid nonsense, because the engine knows no text; docs/sim-engine.md says how.
"""
