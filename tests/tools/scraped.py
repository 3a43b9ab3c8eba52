"""A `/metrics` page, parsed by Prometheus's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(page: str) -> Samples:
    """`(name, label values in the page's order)` -> value. AssertionError where a family has no HELP or TYPE."""
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation, f"{family.name} has no HELP"
        assert family.type != "unknown", f"{family.name} has no TYPE"
        for sample in family.samples:
            key = (sample.name, tuple(sample.labels.values()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def by_label(found: Samples, name: str) -> dict[tuple[str, ...], float]:
    """One metric's samples that are not 0, by label values."""
    return {labels: value for (metric, labels), value in found.items() if metric == name and value}
