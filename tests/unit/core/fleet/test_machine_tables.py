"""The machine's own tables are whole: nothing can come in that nobody handles."""

from __future__ import annotations

from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.step import HANDLERS


def test_every_event_has_its_handler() -> None:
    """One without would be a KeyError in the arbiter, at the first time that it happens."""
    kinds = {each for each in vars(st).values() if isinstance(each, type) and issubclass(each, st.Event)}
    assert set(HANDLERS) == kinds - {st.Event, st.Command}
