"""A BLIP-2-like model that looks at pictures: the tiny model's sizes behind a vision tower and a Q-Former.

Made by transformers from configurations alone, all weights random; each picture is eight tokens before the prompt.
(LLaVA's and Qwen's models ask for torchvision in vLLM, which `install.sh` leaves out.)
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from tests.vllm.make_tiny_model import (
    CONTEXT,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    TEMPLATE,
    VOCABULARY,
    make_tokenizer,
)

IMAGE = "<image>"
SIDE, PATCH, QUERIES = 56, 14, 8


def make_blip(folder: Path, texts: Sequence[Path], *, seed: int = 0) -> Path:
    """Write everything that vLLM reads of such a model into `folder`; needs torch and transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, texts, [IMAGE], TEMPLATE)
    _processor(folder)
    _model(folder, tokenizer.token_to_id(IMAGE), seed)
    return folder


def _processor(folder: Path) -> None:
    from transformers import Blip2Processor, BlipImageProcessorPil, PreTrainedTokenizerFast

    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    Blip2Processor(images, tokenizer, num_query_tokens=QUERIES).save_pretrained(folder)


def _model(folder: Path, image_token: int, seed: int) -> None:
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        LlamaConfig,
    )

    text = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
    }
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**sizes, image_size=SIDE, patch_size=PATCH),
        qformer_config=Blip2QFormerConfig(**sizes, vocab_size=VOCABULARY, encoder_hidden_size=HIDDEN),
        text_config=text,
        num_query_tokens=QUERIES,
        image_token_index=image_token,
    )
    model = Blip2ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.dim() > 1:
                scale = 1.0 if "embed_tokens" in name or "query" in name else values[0].numel() ** -0.5
                values.copy_(torch.randn(values.shape, generator=generator) * scale)
    model.save_pretrained(folder)


def picture(seed: int, size: tuple[int, int] = (80, 60)) -> str:
    """A picture of chequered noise, as the data: URL that a client sends."""
    from PIL import Image

    width, height = size
    pixels = ((x * seed, y * 3 * seed, x * y) for y in range(height) for x in range(width))
    out = io.BytesIO()
    Image.frombytes("RGB", size, bytes(value % 256 for pixel in pixels for value in pixel)).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
