"""How an extra that is missing comes in, as every message says it. The package is on no index."""


def how_to_install(extra: str) -> str:
    """The command, and where."""
    return f"`pip install '.[{extra}]'` in your clone of dynamo-local"
