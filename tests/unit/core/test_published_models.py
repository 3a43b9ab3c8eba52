"""Tests that each published config that is at hand can be read."""

from __future__ import annotations

from dynamo_local.core.model_facts import model_facts
from tests.tools.published_models import FITS, config, folder, names, quantisation

UNKNOWN = ("DeepSeek-V4", "MiniMax-M3")
"""Models whose KV is estimated from above."""


def test_every_published_config_is_understood() -> None:
    configs = folder()
    found = {name: model_facts(config(configs, name), quantisation(configs, name)) for name in names(configs)}
    assert found.keys() >= set(FITS)
    assert {name for name, facts in found.items() if not facts.exact} == {
        name for name in found if any(each in name for each in UNKNOWN)
    }
    assert all(facts.max_len >= 4096 and facts.divides(1) for facts in found.values())
