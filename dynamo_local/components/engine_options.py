"""From a worker's section to a started engine. The engine's package is imported only when it is used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dynamo_local.components.text.model import TINY_MODEL, TINY_TOKENS
from dynamo_local.core.prewarmed import EngineName, engine_of
from dynamo_local.engines import make_engine
from dynamo_local.engines.sleep import GROWTH_MAX_BYTES, CanSleep, EngineStandby
from dynamo_local.errors import ConfigError
from dynamo_local.ports import Engine, KvEventPublisher, PassSink
from dynamo_local.sdk.checks import unknown_key
from dynamo_local.sdk.context import WorkerContext
from dynamo_local.sdk.service_config import underscored
from dynamo_local.sdk.settings import accepted_names

if TYPE_CHECKING:
    from dynamo_local.engines.vllm.options import Transfer, VllmOptions

log = logging.getLogger(__name__)

ENGINE = "engine"
"""Under which a component hands its engine over to the next role of its process."""


class EngineConfig(BaseModel):
    """The options that the sections of all workers with an engine share.

    Keys that are not named here are the engine's: vLLM takes its own arguments, the sim engine none (it has `sim`).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = Field(
        default=TINY_MODEL, min_length=1, description="Local model folder, or sim-tiny with the sim engine."
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="The model's name in the API; by default `model`."
    )
    engine: EngineName | None = Field(
        default=None,
        description="The engine: sim or vllm. Default: sim for the model sim-tiny, vllm for any other.",
    )
    sim: dict[str, Any] = Field(default_factory=dict, description="Options of the sim engine; see docs/sim-engine.md.")
    max_model_len: int | None = Field(default=None, ge=2, description="Prompt and answer, tokens; None: the engine's.")
    forward_passes: bool = Field(
        default=True, description="Tell planners what each pass of the engine did; see docs/observations.md."
    )
    standby_growth_max_bytes: int = Field(
        default=GROWTH_MAX_BYTES,
        ge=1,
        description="With ServiceArgs.standby: a process whose memory has grown by more than this over its sleeps is "
        "replaced; see docs/actuators.md.",
    )
    measurable: bool = Field(
        default=False, description="Let the engine be measured from outside: `dynamo profile` sets it for its own runs."
    )
    prefill_queue: str = Field(
        default="",
        pattern=r"[A-Za-z0-9_-]*",
        description="Name of the prefill queue: each model of the section Models has one of its own.",
    )
    fpm_events: bool = Field(
        default=False, description="Publish each pass on Dynamo's event plane, too, for planners of Dynamo's."
    )

    @field_validator("sim")
    @classmethod
    def _sim_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_sim_options(value)

    @model_validator(mode="after")
    def _one_engine(self) -> Self:
        extra = self.model_extra or {}
        if self.engine_name == "sim":
            for key in extra:
                raise ValueError(unknown_key(key, accepted_names(type(self))))
            return self
        if self.model == TINY_MODEL:
            raise ValueError(f"engine is vllm, but model is {TINY_MODEL}, which only the sim engine has; give a folder")
        if self.sim:
            if (why := self.why_no_model()) is not None:
                raise ValueError(why)
            raise ValueError(
                "sim: options of the sim engine have no effect with engine vllm; remove them, or set engine: sim"
            )
        try:
            self.vllm_options(0).arguments()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def why_no_model(self) -> str | None:
        """Why the model cannot be read on this host; None: it is a folder, or a name that only the engine knows."""
        given = Path(self.model).expanduser()
        if not self.model.startswith(("/", "./", "../", "~")) or given.is_dir():
            return None
        return (
            f"model {self.model}: there is no such folder on this host; name one with a config.json, or download it: "
            f"hf download ORGANISATION/NAME --local-dir {self.model}"
        )

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model

    @property
    def engine_name(self) -> EngineName:
        """The engine: `sim` for a real model only if the section says so."""
        return engine_of(self.engine, self.model, TINY_MODEL)

    def vllm_options(self, gpus: int) -> VllmOptions:
        """The options of a worker with this many GPUs."""
        from dynamo_local.engines.vllm.options import VllmOptions

        return VllmOptions(
            model=str(Path(self.model).expanduser()) if self.model.startswith("~") else self.model,
            served_model_name=self.served_model_name,
            max_model_len=self.max_model_len,
            gpus=gpus,
            transfer=self.kv_transfer,
            args={underscored(key): value for key, value in (self.model_extra or {}).items()},
            **self.more_vllm_options(),
        )

    @property
    def kv_transfer(self) -> Transfer:
        """Which end of a KV hand-off the engine is."""
        return "none"

    def more_vllm_options(self) -> dict[str, Any]:
        """Our own options of the vLLM engine, where the section has some."""
        return {}


def check_sim_options(options: dict[str, Any]) -> dict[str, Any]:
    """For pydantic validators: the options as they are, or ValueError with the sim engine's own explanation."""
    from dynamo_local.engines.sim.options import SimOptions

    try:
        SimOptions.from_mapping(options)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return options


def sim_options(model: str, max_model_len: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The sim engine's options, with the ids that the model's tokenizer can show where none were given."""
    merged: dict[str, Any] = {str(key).replace("-", "_"): value for key, value in options.items()}
    merged.setdefault("model", model)
    if max_model_len is not None:
        merged["max_model_len"] = max_model_len
    low, high = TINY_TOKENS if model == TINY_MODEL else (None, _vocab_size(model))
    if low is not None:
        merged.setdefault("token_low", low)
    if high is not None:
        merged.setdefault("token_high", high)
    return merged


def _vocab_size(model: str) -> int | None:
    """From the folder's config.json; None where it does not say."""
    path = Path(model).expanduser() / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model folder {model}: config.json cannot be read: {error}") from error
    return value if isinstance(value, int) else None


async def start_observed_engine(
    config: EngineConfig,
    context: WorkerContext,
    kv_events: KvEventPublisher | None = None,
    more: Callable[[], Mapping[str, float]] = dict,
) -> Engine:
    """A started engine of which planners may ask what it does, with `more` counters. See `start_engine`. It is closed
    with the process.

    The one that this process has, where it had another role before; one whose worker may have another role later can
    both give KV and take it.
    """
    passes = await context.passes(publish=config.fpm_events) if config.forward_passes else None
    engine: Engine | None = context.inherited.get(ENGINE)
    if engine is None:
        both = context.flips_to is not None
        engine = await start_engine(config, context.gpus, kv_events, passes, both=both, standby=context.standby)
        context.keep(engine.close)
        context.vital(engine.wait_failed(), "the engine")
        if context.standby:
            context.wait_for("a rehearsal of its sleep")
            sleeper = EngineStandby(cast(CanSleep, engine), growth_max_bytes=config.standby_growth_max_bytes)
            await sleeper.rehearse()
            context.set_sleeper(sleeper)

    if config.measurable:
        from dynamo_local.components.measurement import MEASURE, Measurable, MeasureRequest
        from dynamo_local.transport.passes import PassRecorder

        recorder = passes if isinstance(passes, PassRecorder) else None
        context.serve_endpoint(MEASURE, Measurable(engine, recorder).measure, MeasureRequest)

    async def counters() -> Mapping[str, float]:
        return {**engine.counters(), **more()}

    context.observe(counters, engine.info.limits)
    return engine


async def start_engine(
    config: EngineConfig,
    gpus: int,
    kv_events: KvEventPublisher | None = None,
    passes: PassSink | None = None,
    *,
    both: bool = False,
    standby: bool = False,
) -> Engine:
    """A started engine. Raises `ConfigError` for options that cannot be used. Cancelled, it leaves no engine behind.

    `both`: it gives KV and takes it, whatever its section says. `standby`: it is made so that it can sleep.
    """
    options: VllmOptions | dict[str, Any]
    if config.engine_name == "vllm":
        options = replace(config.vllm_options(gpus), sleep_mode=standby)
        if both:
            options = replace(options, transfer="both")
    else:
        options = sim_options(config.model, config.max_model_len, config.sim)
    engine = make_engine(config.engine_name, options, kv_events=kv_events, passes=passes)
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    log.info("engine ready: %s", engine.info)
    log.debug("engine ready: %r", engine.info)
    return engine
