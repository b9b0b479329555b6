"""A tiny random-weight target with a real byte-level tokenizer: seconds instead of minutes, for tests and debugging."""

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mtptrain.files import write_folder_atomic

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320
_CORPUS = """user assistant system
The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.
Write a short story about a river. Explain how a bicycle works. Give three reasons why people like music.
How do I sort a list in Python? You can use the sorted function, which returns a new list in order.
"""
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_STD = 0.12
"""Large enough that attention and MLPs outweigh the embedding, so that greedy output depends on what came before."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCAB_SIZE` tokens (every byte, a few merges, three special tokens 0..2) with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=_SHAPE["max_position_embeddings"],
    )


def make_tiny_target(folder: Path, model_type: str = "llama", seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Save a random-weight causal LM (config.json, safetensors, tokenizer) in `folder`, atomically, and return it.

    `overrides` are config.json keys laid over the tiny shape (hidden 64, 3 layers, 4/2 heads). The same arguments give the same bytes.
    """
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape) * _STD
                weight.copy_(weight + noise if "norm" in name else noise)

    def write(tmp: Path) -> None:
        model.to(getattr(torch, dtype)).save_pretrained(tmp)
        tiny_tokenizer().save_pretrained(tmp)
        os.chmod(tmp / "model.safetensors", 0o644)

    write_folder_atomic(folder, write)
    return folder
