"""Another program's Prometheus metrics as numbers. A number that is absent is None, never 0."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


class Metrics:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        """Raises `ValueError` where it is no exposition text."""
        self._samples: dict[str, list[Any]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):  # with some clients a gauge that was never set is NaN
                    self._samples.setdefault(sample.name, []).append(sample)

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[Any]:
        wanted = labels.items()
        return (sample for sample in self._samples.get(name, ()) if wanted <= sample.labels.items())

    def sum(self, name: str, **labels: str) -> float | None:
        """Over all samples of that name with these labels; None where there is none."""
        values = [float(sample.value) for sample in self._matching(name, labels)]
        return sum(values) if values else None

    def first(self, *names: str) -> float | None:
        """The mean of the first name that is there; None where none is."""
        for name in names:
            values = [float(sample.value) for sample in self._samples.get(name, ())]
            if values:
                return sum(values) / len(values)
        return None

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """A histogram's (upper bound, cumulative count), ascending, over all its label values; empty where absent."""
        found: dict[float, float] = {}
        for sample in self._samples.get(f"{name}_bucket", ()):
            with contextlib.suppress(KeyError, ValueError):
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0.0) + float(sample.value)
        return sorted(found.items())

    def label(self, label: str) -> str | None:
        """The value that samples give to this label, where they all give the same; None where none has it."""
        found = {
            sample.labels[label] for samples in self._samples.values() for sample in samples if label in sample.labels
        }
        return found.pop() if len(found) == 1 else None
