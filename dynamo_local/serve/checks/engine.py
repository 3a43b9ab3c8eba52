"""What only vLLM can say about a section is asked before anything starts: a typing error must not cost a GPU start."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from dynamo_local.config import Config
from dynamo_local.core.extras import how_to_install
from dynamo_local.core.types import GraphSpec, ServiceSpec
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import accepted_names, validate_section

log = logging.getLogger(__name__)


def _check_standby(service: ServiceSpec, options: Any) -> None:
    """Raises `ConfigError` where vLLM could never sleep: known before anything starts."""
    from dynamo_local.engines.vllm.sleeping import CONNECTOR, NIXL, NO_PLATFORM

    if service.standby is None:
        return
    why = None
    if not service.resources.gpu:
        why = f"{NO_PLATFORM.format(platform='CPU')}, and its workers have no GPU"
    elif options.transfer != "none" or CONNECTOR in options.args:
        why = NIXL
    if why is not None:
        raise ConfigError(f"ServiceArgs.standby cannot be: {why}; remove it")


def check_engines(graph: LoadedGraph, spec: GraphSpec, config: Config, *, only_plan: bool = False) -> tuple[str, ...]:
    """Raises `ConfigError` naming the section and the key that vLLM refuses, or that vLLM is not installed.

    `only_plan` (`--dry-run`): on a host without vLLM say so instead; the plan is good for another host.
    """
    from dynamo_local.engines.vllm.checking import VllmSection, is_installed, what_is_wrong

    sections = {}
    for service in spec.components:
        model = graph.services[service.name].config_model
        if model is None or not hasattr(model, "vllm_options"):
            continue
        settings: Any = validate_section(model, f"{config.source}: {service.name}", service.config)
        if settings.engine_name != "vllm":
            continue
        try:
            options = settings.vllm_options(service.resources.gpu)
            _check_standby(service, options)
            words = replace(options, sleep_mode=service.standby is not None).words()
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {service.name}: {error}") from None
        sections[service.name] = VllmSection(tuple(words), tuple(accepted_names(model)))
    if not sections:
        return ()
    if not is_installed():
        named = ", ".join(sections)
        missing = f"{named}: the engine is vllm, which is not installed here"
        if only_plan:
            return (f"{missing}: its options were not checked",)
        raise ConfigError(f"{missing}; {how_to_install('vllm')} (docs/vllm.md), or set engine: sim")
    for name, why in what_is_wrong(sections).items():
        raise ConfigError(f"{config.source}: {name}: {why}")
    return ()
