"""Write a Llama that is small enough for two servers on two cores; vLLM gives it random weights.

    python tiny_model.py DIRECTORY

Run by the Python that has vLLM: it brings `transformers` and `tokenizers`. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

VOCABULARY = 320
CONTEXT_TOKENS = 512


def main(directory: Path) -> None:
    """Configuration and tokenizer; `--load-format dummy` needs no weights."""
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")

    words = {"<s>": 0, "</s>": 1, "<unk>": 2}
    for letter in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        words[letter] = len(words)
    while len(words) < VOCABULARY:
        words[f"<filler{len(words)}>"] = len(words)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=words, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(directory)
    transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
