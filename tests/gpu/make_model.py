"""A Llama-like model of a real size with random weights, where no model can be had: `make_model.py FOLDER [SEED]`.

The default is the shape of Llama 3.1 8B, but a vocabulary of 1,024: 7 billion parameters, 14 GB in bfloat16. It is
made on the GPU if there is one. Its answers are noise, but exact noise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.drivers.served import ROOT
from tests.vllm.make_tiny_model import TEMPLATE, VOCABULARY, make_tokenizer


def make(folder: Path, *, seed: int = 0, hidden: int = 4096, intermediate: int = 14336, layers: int = 32) -> Path:
    """Write config, tokenizer and weights into `folder`."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, sorted((ROOT / "docs").glob("*.md")), (), TEMPLATE)
    heads, kv_heads, head = hidden // 128, hidden // 512, 128
    _config(folder, hidden=hidden, intermediate=intermediate, layers=layers, heads=(heads, kv_heads), head=head)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        made = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32)
        return (made / columns**0.5).to(torch.bfloat16).cpu()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shard = {
            f"{at}.self_attn.q_proj.weight": matrix(heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, heads * head),
            f"{at}.mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{at}.mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, intermediate),
            f"{at}.input_layernorm.weight": ones.clone(),
            f"{at}.post_attention_layernorm.weight": ones.clone(),
        }
        if layer == 0:
            shard |= {
                "model.embed_tokens.weight": matrix(VOCABULARY, hidden),
                "model.norm.weight": ones.clone(),
                "lm_head.weight": matrix(VOCABULARY, hidden),
            }
        name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(shard, str(folder / name), metadata={"format": "pt"})
    _index(folder)
    return folder


def _config(folder: Path, *, hidden: int, intermediate: int, layers: int, heads: tuple[int, int], head: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def _index(folder: Path) -> None:
    """Says which file has which weight, as a model of several files must."""
    from safetensors import safe_open

    files: dict[str, str] = {}
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        size += path.stat().st_size
        with safe_open(str(path), "pt") as content:
            files |= dict.fromkeys(content.keys(), path.name)
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    make(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
