"""What circus loads: the arbiter, the commands on its endpoint, plugins, and what drives a stock circusd.

Installed as `dynamo_local.circus_plugins`; the top-level folder is only where the source lies. A bare `circus_plugins`
package would shadow, or be shadowed by, a user's own module of that name (and `dynamo serve` imports users' code), so
importing it by the bare name is refused.
"""

if not __name__.startswith("dynamo_local."):
    raise ImportError(f"import dynamo_local.{__name__}, not the bare {__name__!r}")
