"""The model and the prompts: made on the spot, the same every time."""

import json
import random
from pathlib import Path

from tests.tiny_model import CORPUS, make_tiny_model

from benchmarks.common import ROOT, TINY_MODEL


def make_model(hidden: int, layers: int) -> dict[str, float]:
    """Makes a random Llama with the tiny model's tokenizer; see `model_path`.

    Returns:
      Its millions of parameters.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    make_tiny_model(TINY_MODEL)
    path = model_path(hidden, layers)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path)
    return {"millions": sum(p.numel() for p in model.parameters()) / 1e6}


def model_path(hidden: int, layers: int) -> Path:
    """Where a model of this size is kept."""
    return ROOT / f".cache/models/benchmark-llama-{hidden}x{layers}"


def make_rows(
    path: Path, tokenizer: Path, prefixes: int, each: int, tokens: int, *, shuffled: bool
) -> float:
    """Writes rows of a long `guide`, which `each` of them share, and a short `question`.

    Args:
      path: The file, lines of JSON.
      tokenizer: The model's directory.
      prefixes: How many guides.
      each: How many questions of each.
      tokens: Of each guide.
      shuffled: Whether the rows are in random order, or by guide.

    Returns:
      The mean tokens of a prompt.
    """
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    draw = random.Random(7)
    words = sorted({word for line in CORPUS for word in line.split() if word.isalpha()})
    rows = []
    total = 0
    for n in range(prefixes):
        text = f"{n}"
        while (missing := tokens - len(encode(text).ids)) > 0:
            # About one token a word; the rest is found in the next turn.
            text += "".join(f" {draw.choice(words)}" for _ in range(max(1, missing // 3)))
        for i in range(each):
            row = {"guide": text, "question": f"{' '.join(draw.choices(words, k=6))} {i}"}
            total += len(encode(PROMPT.format(**row)).ids)
            rows.append(row)
    if shuffled:
        draw.shuffle(rows)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return total / len(rows)


PROMPT = "{guide}\n\n{question}\n"
