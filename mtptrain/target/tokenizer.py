"""The target's tokenizer: loading, its content hash, and the ids that end a turn."""

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mtptrain.errors import UserError
from mtptrain.files import hash_file, hash_json
from mtptrain.target.spec import id_list, read_config

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""What transformers calls its warning of a text longer than the tokenizer says that its model takes."""


def load_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer saved beside the target, never another one."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); copy the target's own into it")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    tokenizer.deprecation_warnings[_TOO_LONG] = True  # rows are cut or dropped, and counted, where their length matters
    return tokenizer


def tokenizer_hash(folder: Path) -> str:
    """Content hash of every file that makes the tokenizer and its chat template."""
    present = [*(folder / name for name in _FILES if (folder / name).exists()), *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    return hash_json({str(path.relative_to(folder)): hash_file(path) for path in present})


def stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end generation: those of generation_config.json, config.json and the tokenizer, sorted, each once."""
    ids = set(id_list(read_config(folder).get("eos_token_id"))) | set(id_list(tokenizer.eos_token_id))
    generation = folder / "generation_config.json"
    if generation.exists():
        ids |= set(id_list(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")))
    if not ids:
        raise UserError(f"{folder} names no end-of-sequence token; set eos_token_id in its generation_config.json")
    return sorted(ids)
