"""What every policy is, so that the arbiter's loop, the simulation and a replay of recorded pulls can drive any."""

from __future__ import annotations

from typing import Protocol, TypeVar

from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.options import PolicyOptions
from dynamo_local.planner.values.decisions import Decision
from dynamo_local.planner.values.forecasts import Forecasts, ForecastTask, Prediction
from dynamo_local.planner.values.proposals import ComponentTarget, Proposal
from dynamo_local.planner.values.pull import Pull, Wants
from dynamo_local.planner.values.standing import Standing

S = TypeVar("S")


class Policy(Protocol[S]):
    """Pure: the same state and the same values give the same answer. `S` is its state, an immutable value.

    A tick runs through it in this order (`driver.PolicyDriver`); the shell does what takes time (forecasts in another
    process, plugins of others) between the calls, each under a deadline:

        task = policy.forecasting(state, pull)          # PREDICT
        state, prediction = policy.predicted(state, pull, forecasts)
        state, proposals = policy.propose(state, pull, prediction)   # PROPOSE; RECONCILE and CONSTRAIN merge them
        state, decision = policy.settle(state, pull, targets)        # budgets and floors, with the reasons

    A policy that holds proposes nothing; `settle` then says why. While `pull.blind` says that the workers cannot be
    observed, every other value of the pull is `Missing`, and a policy holds.
    """

    @property
    def options(self) -> PolicyOptions:
        """What it goes by."""
        ...

    def first(self, now_s: float) -> S:
        """The state at a start, or after a pause."""
        ...

    def taking_over(self, state: S) -> S:
        """The state goes on under this policy's options; one of its kind with other options has made it."""
        ...

    def next_at_s(self, state: S) -> float:
        """When it wants the next pull: an absolute time of the planner's clock."""
        ...

    def wants(self, state: S) -> Wants:
        """What that pull must bring."""
        ...

    def forecasting(self, state: S, pull: Pull) -> ForecastTask | None:
        """What is to be forecast for this tick; None where nothing is due."""
        ...

    def predicted(self, state: S, pull: Pull, forecasts: Forecasts | Missing | None) -> tuple[S, Prediction | None]:
        """The next window as this policy expects it; plugins of others may then fill in, or say otherwise."""
        ...

    def propose(self, state: S, pull: Pull, prediction: Prediction | None) -> tuple[S, tuple[Proposal, ...]]:
        """The targets that its built-in stages propose, one proposal for each of them."""
        ...

    def settle(self, state: S, pull: Pull, targets: tuple[ComponentTarget, ...]) -> tuple[S, Decision | None]:
        """The decision for the merged targets (none: nobody proposed any): within floors, budget and jumps. None where
        this pull was only an observation."""
        ...

    def manual(self, state: S, now_s: float) -> S:
        """A person has changed the number of workers."""
        ...

    def standing(self, state: S) -> Standing:
        """Where it stands, for people and for the record of the last decision."""
        ...
