"""The `Planner` section: which policy, and its options.

Each module of options belongs to one policy or to several (`options.POLICIES`), and has the other names that people
know them by (`ALIASES`).
"""

from __future__ import annotations

from dynamo_local.config.planner.options import POLICIES, PlannerConfig, known_names, planner_section

__all__ = ["POLICIES", "PlannerConfig", "known_names", "planner_section"]
