"""Requests made from a few numbers: `dynamo simulate --generate chat|code|sin[,KEY=VALUE…]`.

`options` says what can be asked for, and where its defaults come from; `arrivals` makes the times, `prefixes` the
shared beginnings, `requests` puts them together.
"""

from __future__ import annotations

from dynamo_local.twin.generator.options import KINDS, BadGenerate, Generated, GeneratorOptions, parse_generated
from dynamo_local.twin.generator.requests import generate

__all__ = ["KINDS", "BadGenerate", "Generated", "GeneratorOptions", "generate", "parse_generated"]
