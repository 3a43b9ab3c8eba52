"""Modules that circus loads: the arbiter, the commands on its endpoint, plugins, and the host for a stock circusd.

Installed as `dynamo_local.circus_plugins`. The top-level folder only holds the source. A bare `circus_plugins` package
would shadow, or be shadowed by, a user's own module of that name, because `dynamo serve` imports users' code. So an
import by the bare name is refused.
"""

if not __name__.startswith("dynamo_local."):
    raise ImportError(f"import dynamo_local.{__name__}, not the bare {__name__!r}")
