"""Tokenizer beside the target: byte round trip, hash, stop ids."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtptrain.errors import UserError
from mtptrain.target.tokenizer import load_tokenizer, stop_token_ids, tokenizer_hash
from tests.unit.tiny import tiny_llama, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "t")


@given(st.text())
def test_tiny_tokenizer_is_lossless(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert max(ids, default=0) < 320
    if "<|" not in text:
        assert TOKENIZER.decode(ids) == text


def test_tiny_template_is_chatml(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.eos_token_id == 2
    assert len(tokenizer) == 320


def test_a_text_longer_than_the_model_takes_is_no_warning_of_the_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.tokenization_utils_base import logger

    warned: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *_: warned.append(text))
    for tokenizer in (load_tokenizer(folder, trust_remote_code=False), tiny_tokenizer()):
        tokenizer.model_max_length = 4
        tokenizer("longer than four")
    assert len(warned) == 1, "the second one's"


def test_the_hash_covers_tokenizer_and_template(folder: Path, tmp_path: Path) -> None:
    before = tokenizer_hash(folder)
    assert tokenizer_hash(tiny_llama(tmp_path / "again", hidden_size=32)) == before
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    changed = tokenizer_hash(folder)
    assert changed != before
    (folder / "special_tokens_map.json").write_text("{}")
    assert tokenizer_hash(folder) not in (before, changed)


def test_stop_ids_are_the_union_sorted(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 0, 2]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert stop_token_ids(folder, tokenizer) == [0, 2, 7, 9]
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert stop_token_ids(folder, tokenizer) == [2]


def test_no_stop_id_and_no_tokenizer_get_one_line(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    tokenizer.eos_token = None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match="names no end-of-sequence token"):
        stop_token_ids(folder, tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(tmp_path / "empty", trust_remote_code=False)
