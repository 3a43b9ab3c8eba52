"""A graph that is measured is looked at, also while its host can hardly answer."""

from __future__ import annotations

import pytest

from dynamo_local.measuring.graph import GraphFailed, patiently


class Arbiter:
    """Answers after so many looks."""

    def __init__(self, silent: int) -> None:
        self.silent = silent
        self.asked = 0

    async def status(self) -> str:
        """Raises `GraphFailed` while it is silent."""
        self.asked += 1
        if self.asked <= self.silent:
            raise GraphFailed(f"did not answer look {self.asked}")
        return "{}"


async def test_an_arbiter_that_does_not_answer_at_once_is_asked_again():
    arbiter = Arbiter(silent=2)
    assert await patiently(arbiter.status, tries=3) == "{}"
    assert arbiter.asked == 3


async def test_one_that_never_answers_is_given_up_with_what_it_said_last():
    with pytest.raises(GraphFailed, match="look 3"):
        await patiently(Arbiter(silent=9).status, tries=3)
