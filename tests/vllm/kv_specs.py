"""The KV of models as vLLM computes it, from their configs alone. Run in vLLM's environment.

python tests/vllm/kv_specs.py < MODELS   where MODELS is {name: {"config": {…}, "kv_dtype": "auto"}, …}

Each model is made without memory (torch's device `meta`), with few experts and a small vocabulary, and asked for its
layers' KV cache specs. The answer is a JSON line each: {name: {"token": …, "windows": …, "state": …} or {"error": …}},
bytes per token of layers that keep all tokens, of layers with a window, and per sequence.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

MARK = "kv-specs:"
SMALL = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "num_nextn_predict_layers": 0,
}


def shrunken(config: dict[str, Any]) -> dict[str, Any]:
    """The language model alone: the same attention, few experts, a small vocabulary, weights that are not quantised."""
    small = copy.deepcopy(config.get("text_config") or config)
    small["architectures"] = [
        name.replace("ForConditionalGeneration", "ForCausalLM") for name in config["architectures"]
    ]
    for key in ("quantization_config", "auto_map"):
        small.pop(key, None)
    if "hybrid_override_pattern" in small:  # such experts need a GPU, and keep no KV
        small["hybrid_override_pattern"] = small["hybrid_override_pattern"].replace("E", "-")
    small.update({key: value for key, value in SMALL.items() if small.get(key)})
    small.update({key: 1 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in small})
    return small


def specs_of(folder: Path, kv_dtype: str) -> dict[str, int]:
    """Bytes of the model whose config lies in that folder."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        kv_cache_dtype=kv_dtype,
        max_model_len=256,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    ).create_engine_config()
    with set_current_vllm_config(config):
        parallel()
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            initialize_model(vllm_config=config)
        found = get_kv_cache_spec(config)
    sums = {"token": 0, "windows": 0, "state": 0}
    for spec in found.values():
        if isinstance(spec, MambaSpec):
            sums["state"] += spec.real_page_size_bytes
        else:
            windowed = isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
            each, rest = divmod(spec.unpadded_page_size_bytes, spec.block_size)
            assert rest == 0, spec
            sums["windows" if windowed else "token"] += each
    return sums


def parallel() -> None:
    """One rank."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()  # its groups depend on the model
    parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mkstemp()[1]}", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)


STAND_IN = """import importlib.machinery, sys


class Kind(type):
    def __getattr__(cls, name):
        return anything(name)


class Any(metaclass=Kind):
    pass


def anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Any


class Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = anything


__path__ = []
sys.meta_path.append(Finder())
__getattr__ = anything
"""


def stand_in(folder: Path) -> None:
    """A torchvision without content, for modules that import it at their top: the CPU build of vLLM comes without."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    (folder / "torchvision.py").write_text(STAND_IN)
    about = folder / "torchvision-0.99.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99\n")
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])


def main() -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as modules:
        stand_in(Path(modules))
        _answer_all()


def _answer_all() -> None:
    for name, asked in json.load(sys.stdin).items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shrunken(asked["config"])))
            try:
                answer: dict[str, Any] = specs_of(Path(folder), asked["kv_dtype"])
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(MARK + json.dumps({name: answer}), flush=True)


if __name__ == "__main__":
    main()
