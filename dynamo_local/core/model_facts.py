"""A model's size in memory by its `config.json`: attention kinds, KV bytes, state, lengths. Pure.

All sizes are in bytes. A rank is one GPU of a tensor-parallel group: KV heads are divided among the ranks, and
repeated where there are fewer heads than ranks. MLA keeps the same latent vector on each rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
KV_DTYPE_BYTES: Mapping[str, int] = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}

INDEX_BLOCK, INDEX_SCALE_BYTES = 128, 4
"""DeepSeek's sparse attention keeps one byte for each value of its index key, and a scale for each 128 of them."""
INDEX_DTYPE_BYTES = 1
NUMBER_MAX, LAYERS_MAX = 10**12, 100_000
"""Greater numbers are damage. A list of so many layers would fill the memory."""

Config = Mapping[str, Any]


class BadModelConfig(ValueError):
    """A value of `config.json` that no model can have. The text names key and value."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One kind of layer that keeps keys and values.

    `width`: values per token and KV head, key and value together. `window`: tokens that it keeps; None: all.
    `shared`: MLA, whose one vector each rank keeps. `index_bytes`: index keys per token, the same on each rank.
    """

    kv_heads: int
    width: int
    window: int | None = None
    shared: bool = False
    index_bytes: int = 0

    def token_bytes(self, tp: int, value_bytes: int) -> int:
        """Bytes per token on one rank."""
        heads = 1 if self.shared else max(1, -(-self.kv_heads // tp))
        return heads * self.width * value_bytes + self.index_bytes


@dataclass(frozen=True, slots=True)
class State:
    """One kind of layer whose memory does not grow with the sequence: linear attention, Mamba.

    `conv` and `recurrent`: numbers of values for one sequence over all ranks; `recurrent_bytes`: of one of the latter.
    `groups` and `group_values`: groups of Mamba that are repeated where they cannot be divided.
    """

    heads: int
    conv: int
    recurrent: int
    recurrent_bytes: int
    groups: int = 0
    group_values: int = 0

    def sequence_bytes(self, tp: int, value_bytes: int) -> int:
        """Bytes per sequence on one rank."""
        more = (tp - self.groups) * self.group_values if self.groups and self.groups % tp else 0
        return (self.conv + more) // tp * value_bytes + self.recurrent // tp * self.recurrent_bytes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as a plan needs it. `layers`: each kind with the number of its layers.

    `exact`: every layer's kind is known. Else the KV is counted as if each layer kept all tokens.
    """

    architecture: str
    model_type: str
    heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_len: int
    value_bytes: int
    kv_value_bytes: int
    quantisation: str | None
    layers: tuple[tuple[Attention | State, int], ...]
    exact: bool = True

    @property
    def attention(self) -> list[tuple[Attention, int]]:
        """The layers that keep keys and values."""
        return [(kind, count) for kind, count in self.layers if isinstance(kind, Attention)]

    @property
    def states(self) -> list[tuple[State, int]]:
        """The layers with a state."""
        return [(kind, count) for kind, count in self.layers if isinstance(kind, State)]

    def token_bytes(self, tp: int = 1, *, windows: bool = False) -> int:
        """KV bytes per token on one rank: of the layers that keep all tokens, or (`windows`) of those that do not."""
        return sum(
            count * kind.token_bytes(tp, self.kv_value_bytes)
            for kind, count in self.attention
            if (kind.window is not None) == windows
        )

    def state_bytes(self, tp: int = 1) -> int:
        """Bytes of the states of one sequence on one rank."""
        return sum(count * kind.sequence_bytes(tp, self.value_bytes) for kind, count in self.states)

    def sequence_bytes(self, tokens: int, tp: int = 1, *, batched: int = 0) -> int:
        """Bytes that one sequence of so many tokens keeps on one rank.

        `batched`: tokens of one pass, which a window holds until the pass has ended.
        """
        held = self.state_bytes(tp)
        for kind, count in self.attention:
            kept = tokens if kind.window is None else min(tokens, kind.window - 1 + batched)
            held += count * kept * kind.token_bytes(tp, self.kv_value_bytes)
        return held

    def divides(self, tp: int) -> bool:
        """Whether so many ranks can share the model's heads."""
        whole = self.heads % tp == 0 and all(kind.heads % tp == 0 for kind, _ in self.states)
        return whole and all(
            kind.shared or kind.kv_heads % tp == 0 or tp % kind.kv_heads == 0 for kind, _ in self.attention
        )

    def describe(self) -> str:
        """`18 layers of GQA (8 of 64 heads), 18 of GQA (8 of 64 heads, window 128)`."""
        parts = [f"{count} of {self._kind(kind)}" for kind, count in self.layers]
        return ", ".join(parts).replace(" of", " layers of", 1)

    def _kind(self, kind: Attention | State) -> str:
        if isinstance(kind, State):
            return "linear attention"
        if kind.shared:
            return "MLA with an index" if kind.index_bytes else "MLA"
        window = "" if kind.window is None else f", window {kind.window:,}"
        if kind.kv_heads == self.heads:
            return f"MHA ({self.heads} heads{window})"
        return f"GQA ({kind.kv_heads} of {self.heads} heads{window})"


def model_facts(config: Config, quantisation: Config | None = None, kv_dtype: str = "auto") -> ModelFacts:
    """The facts of a `config.json`, `text_config` within it included.

    `quantisation`: the content of `hf_quant_config.json`. `kv_dtype`: vLLM's `kv-cache-dtype`. Raises `BadModelConfig`.
    """
    text = _text(config)
    heads, hidden = _count(text, "num_attention_heads"), _count(text, "hidden_size")
    architectures = config.get("architectures") or text.get("architectures")
    layers, exact = _layers(text, heads)
    value_bytes = _value_bytes(text, config)
    said = _quantisation(config, text, quantisation)
    return ModelFacts(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown",
        model_type=str(text.get("model_type", "unknown")),
        heads=heads,
        hidden=hidden,
        intermediate=_maybe(text, "intermediate_size") or 4 * hidden,
        vocabulary=_count(text, "vocab_size"),
        max_len=_max_len(text),
        value_bytes=value_bytes,
        kv_value_bytes=_kv_bytes(kv_dtype, said, value_bytes),
        quantisation=_method(said),
        layers=layers,
        exact=exact,
    )


# --- values of config.json -----------------------------------------------------------------------


def _text(config: Config) -> Config:
    """The part about the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        nested = config.get(key)
        if isinstance(nested, Mapping) and "hidden_size" in nested:
            return nested
    return config


def _maybe(config: Config, key: str) -> int | None:
    """A whole number above 0; None where there is none. Raises `BadModelConfig`."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadModelConfig(f"{key} is {value!r}, which must be a whole number above 0")
    if value > NUMBER_MAX:
        raise BadModelConfig(f"{key} has {len(str(value))} digits, and no model has more than {NUMBER_MAX:,}")
    return value


def _count(config: Config, key: str) -> int:
    value = _maybe(config, key)
    if value is None:
        raise BadModelConfig(f"{key} is missing")
    return value


def _first(config: Config, *keys: str) -> int | None:
    return next((found for key in keys if (found := _maybe(config, key)) is not None), None)


def _list(config: Config, key: str) -> list[Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise BadModelConfig(f"{key} is {value!r}, which must be a list")
    return value or []


def _value_bytes(text: Config, config: Config) -> int:
    """Bytes of one activation. The default is 2: bfloat16."""
    for part in (text, config):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str):
            found = DTYPE_BYTES.get(name.removeprefix("torch."))
            if found is None:
                raise BadModelConfig(f"dtype is {name!r}; known are {', '.join(DTYPE_BYTES)}")
            return 2 if found == 4 else found  # vLLM's `auto` serves float32 checkpoints in 16 bits
    return 2


def _max_len(text: Config) -> int:
    """Tokens. A rope scaling that stretches positions counts, unless the config has counted it."""
    length = _first(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
    if length is None:
        raise BadModelConfig("max_position_embeddings is missing")
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return length
    kind = scaling.get("rope_type", scaling.get("type"))
    factor, original = scaling.get("factor"), _maybe(scaling, "original_max_position_embeddings")
    if kind in ("linear", "dynamic") and isinstance(factor, int | float) and factor >= 1:
        return int(length * factor)
    if kind == "yarn" and isinstance(factor, int | float) and original is not None:
        return max(length, int(original * factor))
    return length


def _quantisation(config: Config, text: Config, separate: Config | None) -> Config:
    """The checkpoint's quantisation: `quantization_config`, or NVIDIA's own file."""
    for part in (config, text):
        found = part.get("quantization_config")
        if isinstance(found, Mapping):
            return found
    inner = (separate or {}).get("quantization")
    return inner if isinstance(inner, Mapping) else {}


def _method(said: Config) -> str | None:
    """`fp8`, `mxfp4`, `modelopt NVFP4`, `awq`, …"""
    method, algorithm = said.get("quant_method"), said.get("quant_algo") or said.get("format")
    words = [str(word) for word in (method, algorithm) if word]
    return " ".join(words) or None


def _kv_bytes(kv_dtype: str, said: Config, value_bytes: int) -> int:
    """Bytes of one value in the KV cache, as vLLM takes them from its option or from the checkpoint."""
    if kv_dtype != "auto":
        if kv_dtype not in KV_DTYPE_BYTES:
            raise BadModelConfig(f"kv-cache-dtype {kv_dtype!r} is not known; known are {', '.join(KV_DTYPE_BYTES)}")
        return KV_DTYPE_BYTES[kv_dtype]
    scheme, algorithm = said.get("kv_cache_scheme"), said.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8:
        return 1
    return 1 if isinstance(algorithm, str) and algorithm.upper() == "FP8" else value_bytes


# --- layers --------------------------------------------------------------------------------------

Layers = tuple[tuple[Attention | State, int], ...]
KNOWN_KINDS = frozenset(
    {"full_attention", "attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba", "moe", "mlp"}
)
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
UNKNOWN_CACHES = ("compress_ratios", "sparse_attention_config")
"""Keys of models whose caches are not known here (DeepSeek V4, MiniMax M3)."""


def _layers(text: Config, heads: int) -> tuple[Layers, bool]:
    """Each kind of layer with its number, and whether all are known."""
    kinds = _kinds(text)
    exact = not any(text.get(key) for key in UNKNOWN_CACHES)
    if _maybe(text, "kv_lora_rank") is None:
        exact = exact and set(kinds) <= KNOWN_KINDS
    if not exact:
        kinds = ["full_attention"] * len(kinds)
    made: Counter[Attention | State] = Counter()
    for at, kind in enumerate(kinds):
        layer = _layer(text, heads, kind, at)
        if layer is not None:
            made[layer] += 1
    return tuple(made.items()), exact


def _kinds(text: Config) -> list[str]:
    """The kind of each layer, by `layer_types` and its kin; without the last ones if these share others' KV."""
    if (pattern := text.get("hybrid_override_pattern")) is not None:
        unknown = set(str(pattern)) - set(_PATTERN)
        if unknown:
            raise BadModelConfig(f"hybrid_override_pattern has {min(unknown)!r}; known are {' '.join(_PATTERN)}")
        return [_PATTERN[letter] for letter in pattern]
    if blocks := _list(text, "layers_block_type"):
        return [str(block) for block in blocks]
    count = _count(text, "num_hidden_layers")
    if count > LAYERS_MAX:
        raise BadModelConfig(f"num_hidden_layers is {count:,}, and no model has more than {LAYERS_MAX:,}")
    if blocks := _list(text, "block_configs"):
        return ["mlp" if _attention_block(block).get("no_op") else "attention" for block in blocks]
    kinds = [str(kind) for kind in _list(text, "layer_types")][:count] or _pattern(text, count)
    if len(kinds) != count:
        raise BadModelConfig(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {count}")
    return kinds[: count - (_maybe_zero(text, "num_kv_shared_layers") or 0)]


def _maybe_zero(config: Config, key: str) -> int | None:
    return None if config.get(key) == 0 else _maybe(config, key)


def _attention_block(block: Any) -> Config:
    found = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(found, Mapping):
        raise BadModelConfig("block_configs holds an entry without `attention`")
    return found


def _pattern(text: Config, count: int) -> list[str]:
    """Where there is no `layer_types`."""
    if pattern := _list(text, "hybrid_layer_pattern"):
        return ["sliding_attention" if entry else "full_attention" for entry in pattern]
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping):  # Kimi: layers are counted from 1
        states = set(_list(linear, "kda_layers"))
        return ["linear_attention" if at + 1 in states else "full_attention" for at in range(count)]
    if (every := _maybe(text, "full_attention_interval")) is not None:
        return ["full_attention" if (at + 1) % every == 0 else "linear_attention" for at in range(count)]
    if _maybe(text, "attention_chunk_size") is not None:
        every = _maybe(text, "no_rope_layer_interval") or 4
        rope = _list(text, "no_rope_layers") or [int((at + 1) % every != 0) for at in range(count)]
        return ["chunked_attention" if entry else "full_attention" for entry in rope]
    if _window(text) is None:
        return ["full_attention"] * count
    every = _maybe(text, "sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(str(text.get("model_type")))
    return ["full_attention" if every and (at + 1) % every == 0 else "sliding_attention" for at in range(count)]


def _window(text: Config) -> int | None:
    """Tokens of the sliding window in force; None: there is none."""
    off = text.get("use_sliding_window") is False
    return None if off else _maybe_zero(text, "sliding_window") or _maybe_zero(text, "sliding_window_size")


def _layer(text: Config, heads: int, kind: str, at: int) -> Attention | State | None:
    if kind in ("moe", "mlp"):
        return None
    if kind == "mamba":
        return _mamba(text)
    if kind == "linear_attention":
        return _linear(text)
    if _maybe(text, "kv_lora_rank") is not None:
        index = _indexed(text, at)
        return Attention(1, _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim"), None, True, index)
    window = None
    if kind == "sliding_attention":
        window = _window(text)
    elif kind == "chunked_attention":
        window = _maybe(text, "attention_chunk_size")
    return _grouped(text, heads, window, at)


def _grouped(text: Config, heads: int, window: int | None, at: int) -> Attention:
    """MHA or GQA. Some models give their windowed, or their other, layers heads of their own."""
    kv_heads = _maybe(text, "num_key_value_heads") or _maybe(text, "num_attention_groups") or heads
    head = _maybe(text, "head_dim") or _maybe(text, "attention_head_dim") or _count(text, "hidden_size") // heads
    value = _maybe(text, "v_head_dim") if "hybrid_layer_pattern" in text else None
    if blocks := _list(text, "block_configs"):
        kv_heads = heads // (_maybe(_attention_block(blocks[at]), "n_heads_in_group") or 1)
    if window is not None:
        kv_heads = _maybe(text, "swa_num_key_value_heads") or kv_heads
        head = _maybe(text, "swa_head_dim") or head
        value = _maybe(text, "swa_v_head_dim") or value
    elif (wider := _maybe(text, "global_head_dim")) is not None:
        head = wider
        if text.get("attention_k_eq_v"):
            kv_heads = _maybe(text, "num_global_key_value_heads") or kv_heads
    return Attention(kv_heads, head + (value or head), window)


def _indexed(text: Config, at: int) -> int:
    """Bytes of the index key of one token in that layer: 0 where it has none, or takes an earlier layer's choice."""
    size = _maybe(text, "index_head_dim")
    if size is None or _maybe(text, "index_topk") is None:
        return 0
    every, offset = _maybe(text, "index_topk_freq") or 1, _maybe_zero(text, "index_skip_topk_offset")
    offset = 2 if offset is None else offset
    pattern = text.get("index_topk_pattern")
    skipped = pattern[at] == "S" if isinstance(pattern, str) and at < len(pattern) else max(at - offset + 1, 0) % every
    if skipped:
        return 0
    return size * INDEX_DTYPE_BYTES + size // INDEX_BLOCK * INDEX_SCALE_BYTES


def _state_bytes(text: Config, otherwise: int) -> int:
    name = text.get("mamba_ssm_cache_dtype") or text.get("mamba_ssm_dtype")
    return DTYPE_BYTES.get(str(name), otherwise)


def _mamba(text: Config) -> State:
    """Mamba 2, in the spellings of Nemotron-H and of Bamba and Granite."""
    heads = _first(text, "mamba_num_heads", "mamba_n_heads")
    size = _first(text, "mamba_head_dim", "mamba_d_head")
    state = _first(text, "ssm_state_size", "mamba_d_state")
    groups = _first(text, "n_groups", "mamba_n_groups") or 1
    kernel = _first(text, "conv_kernel", "mamba_d_conv") or 4
    if heads is None or size is None or state is None:
        raise BadModelConfig("a mamba layer needs mamba_num_heads, mamba_head_dim and ssm_state_size")
    steps = kernel - 1
    return State(
        heads=heads,
        conv=(heads * size + 2 * groups * state) * steps,
        recurrent=heads * size * state,
        recurrent_bytes=_state_bytes(text, 4 if text.get("model_type") == "nemotron_h" else 2),
        groups=groups,
        group_values=2 * state * steps,
    )


def _linear(text: Config) -> State:
    """Gated delta net (Qwen3-Next, Qwen3.5), or Kimi's KDA."""
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping):
        heads, size = _count(linear, "num_heads"), _count(linear, "head_dim")
        steps = (_maybe(linear, "short_conv_kernel_size") or 4) - 1
        return State(heads, 3 * heads * size * steps, heads * size * size, 4)
    values, keys = _count(text, "linear_num_value_heads"), _count(text, "linear_num_key_heads")
    key, value = _count(text, "linear_key_head_dim"), _count(text, "linear_value_head_dim")
    steps = _count(text, "linear_conv_kernel_dim") - 1
    conv = (2 * keys * key + values * value) * steps
    return State(math.gcd(values, keys), conv, values * value * key, _state_bytes(text, 2))


# --- safetensors -----------------------------------------------------------------------------------


def tensor_bytes(header: Config) -> int:
    """Bytes of the tensors that the header of a safetensors file lists. Raises `BadModelConfig`.

    The tensors lie one after the other, so the greatest end is the size of the data.
    """
    ends = [0]
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, Mapping) else None
        match offsets:
            case [int(begin), int(end)] if 0 <= begin <= end:
                ends.append(end)
            case _:
                raise BadModelConfig(f"its tensor {name!r} has no data_offsets")
    return max(ends)
