"""A LLaVA-like model that looks at pictures: the tiny model's sizes behind a vision tower of three layers, all random.

Made by transformers from configurations alone; each picture is sixteen tokens.
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
SIDE, PATCH = 56, 14


def make_llava(folder: Path, texts: Sequence[Path], *, seed: int = 0) -> Path:
    """Write everything that vLLM reads of such a model into `folder`; needs torch and transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder, texts, [IMAGE], TEMPLATE)
    _processor(folder)
    _model(folder, tokenizer.token_to_id(IMAGE), seed)
    return folder


def _processor(folder: Path) -> None:
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    made = LlavaProcessor(
        image_processor=images,
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which `default` leaves out again
        chat_template=TEMPLATE,
    )
    made.save_pretrained(folder)


def _model(folder: Path, image_token: int, seed: int) -> None:
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(
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
    vision = CLIPVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=HIDDEN,
    )
    config = LlavaConfig(vision, text, image_token_index=image_token, image_seq_length=(SIDE // PATCH) ** 2)
    model = LlavaForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.dim() > 1:
                scale = 1.0 if "embed_tokens" in name else values[0].numel() ** -0.5
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
