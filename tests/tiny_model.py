"""A language model for tests of mechanics: random weights, made in seconds on the spot."""

import os
import shutil
from pathlib import Path

CORPUS = (
    "The pipeline reads rows, groups them by prefix, and asks the model about each one.",
    "A batch of prompts with a common prefix shares the blocks of the key-value cache.",
    "You label support tickets. Answer with one word: bug, question or praise.",
    "0 1 2 3 4 5 6 7 8 9 { } [ ] \" ' : ; , . ! ? - + * / = < > ( ) # @ & % $",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(directory: Path) -> Path:
    """Makes a random Llama (2 layers of 64, 4,096 positions) with a tokenizer and chat template.

    The same every time. Does nothing where it has been made already.

    Returns:
      The directory, as vLLM and transformers take it.
    """
    if (directory / "config.json").exists():
        return directory
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # Made beside and renamed: whoever looks meanwhile sees all of it or nothing.
    partial = directory.with_name(f"{directory.name}.{os.getpid()}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        model_max_length=4096,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(partial)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(partial)
    try:
        partial.rename(directory)
    except OSError:
        if not (directory / "config.json").exists():
            raise
        shutil.rmtree(partial)  # another process was faster
    return directory
