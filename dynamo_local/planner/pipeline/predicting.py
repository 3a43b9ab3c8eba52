"""PREDICT: plugins are asked one after the other, and the first who says something about a field is believed."""

from __future__ import annotations

from dynamo_local.planner.values.forecasts import Prediction

FIELDS = ("num_req", "isl", "osl", "kv_hit_rate", "accept_length")


def filled(so_far: Prediction | None, said: Prediction | None, by: str) -> Prediction | None:
    """The prediction after the next one has spoken: only fields that nobody has filled yet are taken from it.

    `by` is who said it; `source` then names all who filled something, the first one first.
    """
    if said is None or all(getattr(said, name) is None for name in FIELDS):
        return so_far
    if so_far is None:
        return Prediction(**{name: getattr(said, name) for name in FIELDS}, source=said.source or by)
    added = {name: getattr(said, name) for name in FIELDS if getattr(so_far, name) is None}
    if all(value is None for value in added.values()):
        return so_far
    kept = {name: getattr(so_far, name) for name in FIELDS}
    return Prediction(**{**kept, **added}, source=f"{so_far.source}, {said.source or by}")
