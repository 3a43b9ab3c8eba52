"""How `tokenizer.json` beside this file was made: a byte-level BPE trained on this project's own text.

    python dynamo_local/components/text/tiny_tokenizer/make.py FILE…

The three special tokens have the ids 0 to 2, the 256 bytes follow, so every text can be written and
every id below the vocabulary's size is a token. It learns from ASCII lines alone, so that each id above the bytes
is plain text by itself (`components.text.model.TINY_TOKENS`). The output depends on the files given, and is committed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- if tools %}
<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or () %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def make(files: list[str], folder: Path) -> None:
    """Train on the files and write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = (line for file in files for line in Path(file).read_text().splitlines(keepends=True) if line.isascii())
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"bos_token": None, "eos_token": SPECIALS[2], "pad_token": SPECIALS[0], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    eos = [tokenizer.token_to_id(SPECIALS[2]), tokenizer.token_to_id(SPECIALS[0])]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}, indent=2) + "\n")


if __name__ == "__main__":
    make(sys.argv[1:], Path(__file__).parent)
