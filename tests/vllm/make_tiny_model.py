"""A Llama-like model of 150,000 random parameters with a tokenizer of its own, made in a second from any text.

python tests/vllm/make_tiny_model.py FOLDER [TEXT FILE …]

Two layers, hidden size 64, two heads of 32, one KV head; a byte-level BPE of 1,024 entries; the same weights for the
same seed, so that two engines agree. Its answers are noise, but exact noise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, CONTEXT = 1024, 64, 2, 2, 1, 128, 8192
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
REASONING_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if reasoning_effort %}({{ reasoning_effort }}) {% endif %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
"""A model that reasons reads its earlier thoughts, and has efforts."""


def make(folder: Path, texts: Sequence[Path], *, seed: int = 0, labels: int = 0, marks: Sequence[str] = ()) -> Path:
    """Write config, tokenizer and weights into `folder`; needs tokenizers, torch and safetensors.

    With `labels` it is a model that classifies; with `marks`, tokens of their own such as `</think>`, one that reasons.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, texts, marks, REASONING_TEMPLATE if marks else TEMPLATE)
    _config(folder, labels)
    _weights(folder, seed, labels)
    return folder


def make_adapter(folder: Path, *, seed: int = 1, rank: int = 4) -> Path:
    """Write a LoRA adapter of the tiny model into `folder`, strong enough to be seen in its answers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    head = HIDDEN // HEADS
    weights = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * head), ("v_proj", KV_HEADS * head)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
    save_file(weights, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def make_tokenizer(folder: Path, texts: Sequence[Path], marks: Sequence[str], template: str) -> Any:
    """A byte-level BPE of these texts, with `marks` for its last tokens; returns it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(marks),
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train([str(path) for path in texts], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer


def _config(folder: Path, labels: int) -> None:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    if labels:
        names = {str(n): f"label {n}" for n in range(labels)}
        config |= {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}, "num_labels": labels}
        config |= {"architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _weights(folder: Path, seed: int, labels: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * (scale or columns**-0.5)
        return values.to(torch.bfloat16)

    head = HIDDEN // HEADS
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, 1.0),
        **({"score.weight": random(labels, HIDDEN)} if labels else {"lm_head.weight": random(VOCABULARY, HIDDEN, 0.5)}),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": random(HEADS * head, HIDDEN, 0.3),
            prefix + "self_attn.k_proj.weight": random(KV_HEADS * head, HIDDEN, 0.3),
            prefix + "self_attn.v_proj.weight": random(KV_HEADS * head, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * head),
            prefix + "mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
            prefix + "input_layernorm.weight": ones.clone(),
            prefix + "post_attention_layernorm.weight": ones.clone(),
        }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
