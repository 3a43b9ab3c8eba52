"""Our options, read by vLLM's own parser, and the stat logger that we give to vLLM.

Imports vLLM: only the worker and the process of `checks` import this module.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo_local.errors import ConfigError


class _Parser(FlexibleArgumentParser):  # type: ignore[misc, unused-ignore]
    """argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(words: Sequence[str], *, also_known: Sequence[str] = ()) -> argparse.Namespace:
    """The words as vLLM reads them, with its own checks of single values. The model need not be on this host.

    Raises `ConfigError` naming an unknown option and its nearest spelling, `also_known` (our own keys) among them.
    """
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False, allow_abbrev=False))
    known = set(parser._option_string_actions)  # those that help does not show, too: `--no-enable-…` since vLLM 0.33
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in known:
            raise ConfigError(_unknown(option, known, also_known))
    try:
        return parser.parse_args(list(words))
    except (ValueError, TypeError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def engine_args(words: Sequence[str]) -> AsyncEngineArgs:
    """The arguments of an engine on this host. Raises `ConfigError`, also for a model that is not here.

    On vLLM's CPU build, KV to hand over is kept in main memory.
    """
    parsed = parse(words)
    try:
        args = AsyncEngineArgs.from_cli_args(parsed)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"vLLM refuses model {parsed.model}: {' '.join(str(error).split())}") from error
    config: Any = args.kv_transfer_config
    if config is not None and current_platform.is_cpu():
        config.kv_buffer_device = "cpu"
    return args


def _unknown(option: str, known: set[str], also_known: Sequence[str]) -> str:
    name = option.removeprefix("--")
    if name.startswith("no-") and f"--{name[3:]}" in known:
        return f"{name[3:]} is no switch: give it a value"
    ours = {key.replace("_", "-") for key in also_known}
    names = sorted({other.removeprefix("--") for other in known if other.startswith("--")} | ours)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "; see `vllm serve --help=all`"
    return f"unknown key {name!r}: neither an option of this service nor of vLLM{hint}"


def explain(words: Sequence[str], also_known: Sequence[str]) -> str | None:
    """The error in the arguments. None: valid."""
    try:
        parse(words, also_known=also_known)
    except ConfigError as error:
        return str(error)
    return None


def explain_all(text: str) -> str:
    """`[[words, also known], …]` -> `[what is wrong, or null, …]`, both as JSON."""
    return json.dumps([explain(words, also_known) for words, also_known in json.loads(text)])


def stat_logger(record: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """A factory of stat loggers for `AsyncLLM`. vLLM calls the logger after each pass, on the loop of this process.

    `record` takes `SchedulerStats` and `IterationStats`; each may be None.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase  # not at the top: the check of arguments does without it

    class _Logger(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.engine_index = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_more: Any, **_others: Any) -> None:
            record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return _Logger
