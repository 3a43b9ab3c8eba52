"""What Dynamo's admission webhook asks of a graph beyond its schema, and what its planner needs to find the workers.

Names: with Grove, the operator joins the graph's name and a component's to the names of pods, of which 45 characters
may be these. It shortens a graph's name that is too long (PR #12047), and whoever looks for the pods by the name of the
graph no longer finds them; here that is a fault.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from dynamo_local.kubernetes.model import Component, ComponentType
from dynamo_local.kubernetes.program import MODE, mode_of

NAMES_MAX = 45
COMPONENTS_MAX = 25
LEADER = "-ldr"
"""The longer of the two endings that pods of one replica on several nodes get."""
GRAPH_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
PLANNED = (ComponentType.WORKER, ComponentType.PREFILL, ComponentType.DECODE)


def faults(name: str, components: Sequence[Component]) -> tuple[str, ...]:
    """What the webhook or the planner would refuse of a graph of this name, in words; empty if all is well."""
    found = []
    if not GRAPH_NAME.fullmatch(name):
        found.append(
            f"the graph's name {name!r} must begin with a small letter, and have small letters, digits and '-' only, "
            "at most 63; give another one with --name"
        )
    if not components:
        found.append("a graph must have at least one component")
    if len(components) > COMPONENTS_MAX:
        found.append(f"a graph has at most {COMPONENTS_MAX} components, not {len(components)}")
    counts = Counter(component.name.lower() for component in components)
    found += [
        f"two components are named {key!r}, whatever their case; rename one" for key, n in counts.items() if n > 1
    ]
    planned = any(component.type is ComponentType.PLANNER for component in components)
    for component in components:
        found += _of_component(name, component, planned=planned)
    return tuple(found)


def combined_length(name: str, component: Component) -> int:
    """Characters that the graph's and the component's name take in the names of pods."""
    own = len(component.name)
    return len(name) + own + (own + len(LEADER) if component.multinode is not None else 0)


def _of_component(name: str, component: Component, *, planned: bool) -> list[str]:
    found = []
    length = combined_length(name, component)
    if length > NAMES_MAX:
        found.append(
            f"{component.name}: its name and the graph's take {length} characters in the names of pods, and at most "
            f"{NAMES_MAX} may; shorten {component.name!r}, or the graph's name {name!r} (--name)"
        )
    main = component.main
    words = [] if main is None else [*(main.command or ()), *(main.args or ())]
    if component.type is ComponentType.PREFILL and mode_of(words) != "prefill":  # #13238
        found.append(
            f"{component.name}: its type is prefill, but its command has no {MODE} prefill: it would register as a "
            "decode worker, and no planner would find it"
        )
    if planned and component.type in PLANNED and component.scaling_adapter is None:  # #6491
        found.append(f"{component.name}: there is a planner, but no scaling adapter for it to act on")
    return found
