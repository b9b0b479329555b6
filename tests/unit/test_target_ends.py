"""Frozen ends and last layer, read from single-file and sharded checkpoints without the rest."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mtptrain.errors import UserError
from mtptrain.target import ends
from mtptrain.target.ends import INDEX, load_ends, load_last_layer, weights_hash
from tests.unit.tiny import tiny_family, tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))


def shard(folder: Path) -> None:
    """Turn a single-file checkpoint into two shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) drop tensors; `__` in a keyword stands for a dot."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_fault_20_tied_and_untied_single_file_and_sharded(tmp_path: Path, tied: bool, sharded: bool) -> None:
    folder = tiny_llama(tmp_path / "t", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if sharded:
        shard(folder)
    got = load_ends(folder, torch.float32, CPU)
    assert torch.equal(got.embed_VH, model.get_input_embeddings().weight)
    assert torch.equal(got.lm_head_VH, model.get_output_embeddings().weight)
    assert torch.equal(got.final_norm_H, model.model.norm.weight)
    assert (got.lm_head_VH is got.embed_VH) is tied
    assert not any(weight.requires_grad for weight in (got.embed_VH, got.lm_head_VH, got.final_norm_H))


def test_fault_20_a_doubled_lm_head_counts_as_transformers_counts_it(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t", tie_word_embeddings=True)
    embed_VH = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, lm_head__weight=embed_VH.clone())
    same = load_ends(folder, torch.float32, CPU)
    assert same.lm_head_VH is same.embed_VH
    rewrite(folder, lm_head__weight=embed_VH * 2)
    other = load_ends(folder, torch.float32, CPU)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(other.lm_head_VH, embed_VH * 2)
    assert torch.equal(model.lm_head.weight, other.lm_head_VH)


def test_fault_20_a_missing_lm_head_is_refused_not_invented(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t")
    rewrite(folder, lm_head__weight=None)
    with pytest.raises(UserError, match=r"no lm_head\.weight"):
        load_ends(folder, torch.float32, CPU)


def test_a_checkpoint_of_the_bare_decoder_is_read(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(load_ends(folder, torch.float32, CPU).embed_VH, tensors["model.embed_tokens.weight"])
    assert torch.equal(load_last_layer(folder)["mlp.up_proj.weight"], tensors["model.layers.2.mlp.up_proj.weight"])


def test_only_the_ends_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_llama(tmp_path / "t")
    names: list[str] = []
    read = ends._read
    monkeypatch.setattr(ends, "_read", lambda files, name, device: names.append(name) or read(files, name, device))
    load_ends(folder, torch.bfloat16, CPU)
    assert sorted(names) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_dtype_is_converted_once_and_stays_tied(tmp_path: Path) -> None:
    got = load_ends(tiny_llama(tmp_path / "t", tie_word_embeddings=True), torch.bfloat16, CPU)
    assert got.embed_VH.dtype is got.final_norm_H.dtype is torch.bfloat16
    assert got.lm_head_VH is got.embed_VH


def test_a_shape_that_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t")
    rewrite(folder, model__norm__weight=torch.ones(32))
    with pytest.raises(UserError, match=r"norm\.weight is \[32\], but config\.json says \[64\]"):
        load_ends(folder, torch.float32, CPU)


def test_pickled_incomplete_and_damaged_checkpoints_get_one_line(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is damaged"):
        load_ends(folder, torch.float32, CPU)
    (folder / "model.safetensors").write_bytes(whole)
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_ends(folder, torch.float32, CPU)
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        load_ends(folder, torch.float32, CPU)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /nonexistent'\ntR.")
    with pytest.raises(UserError, match="pickled"):
        load_ends(folder, torch.float32, CPU)


def test_last_layer_is_the_last_and_computes_it(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t")
    layer = load_last_layer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model.model.layers[2].state_dict()
    assert layer.keys() == expected.keys()
    assert all(torch.equal(layer[name], expected[name]) for name in layer)


def test_phi3_s_fused_matrices_are_split_in_the_order_of_its_forward(tmp_path: Path) -> None:
    folder = tiny_family(tmp_path / "t", "phi3")
    layer, stored = load_last_layer(folder), load_file(folder / "model.safetensors")
    qkv, gate_up = stored["model.layers.2.self_attn.qkv_proj.weight"], stored["model.layers.2.mlp.gate_up_proj.weight"]
    assert torch.equal(layer["self_attn.q_proj.weight"], qkv[:64])
    assert torch.equal(layer["self_attn.k_proj.weight"], qkv[64:96])
    assert torch.equal(layer["self_attn.v_proj.weight"], qkv[96:128])
    assert torch.equal(layer["mlp.gate_proj.weight"], gate_up[:128])
    assert torch.equal(layer["mlp.up_proj.weight"], gate_up[128:])
    assert not any("qkv" in name or "gate_up" in name for name in layer)


def test_granite_s_residual_multiplier_is_folded_in(tmp_path: Path) -> None:
    folder = tiny_family(tmp_path / "t", "granite")
    layer, stored = load_last_layer(folder), load_file(folder / "model.safetensors")
    assert torch.allclose(layer["self_attn.o_proj.weight"], stored["model.layers.2.self_attn.o_proj.weight"] * 0.22)
    assert torch.allclose(layer["mlp.down_proj.weight"], stored["model.layers.2.mlp.down_proj.weight"] * 0.22)
    assert torch.equal(layer["self_attn.q_proj.weight"], stored["model.layers.2.self_attn.q_proj.weight"])


@pytest.mark.parametrize("model_type", ["mixtral", "gemma2", "olmo2", "deepseek_v2"])
def test_a_last_layer_of_another_form_is_refused(tmp_path: Path, model_type: str) -> None:
    folder = tiny_family(tmp_path / "t", model_type)
    with pytest.raises(UserError, match=f"not possible for a {model_type} target.*use head.init=random"):
        load_last_layer(folder)


def test_weights_hash_follows_content(tmp_path: Path) -> None:
    one, two = tiny_llama(tmp_path / "one"), tiny_llama(tmp_path / "two")
    before = weights_hash(one)
    assert weights_hash(one) == weights_hash(two) == before
    data = bytearray((one / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (one / "model.safetensors").write_bytes(data)
    os.utime(one / "model.safetensors", ns=(1, 1))
    assert weights_hash(one) != before
    (two / "config.json").write_text((two / "config.json").read_text().replace('"silu"', '"gelu"'))
    assert weights_hash(two) != before


def test_weights_of_the_same_size_and_time_are_read_again(tmp_path: Path) -> None:
    """Whatever the clock said: another file put in the old one's place with its mtime."""
    folder = tiny_llama(tmp_path / "t")
    file = folder / "model.safetensors"
    before, stat = weights_hash(folder), file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert weights_hash(folder) != before


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b"\xff", b'{"key": 1, "hash": "0"}'])
def test_a_damaged_cache_of_hashes_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes) -> None:
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    folder = tiny_llama(tmp_path / "t")
    before = weights_hash(folder)
    entries = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(entries) == 2
    for entry in entries:
        entry.write_bytes(damage)
    assert weights_hash(folder) == before
    assert [entry.read_bytes() != damage for entry in entries] == [True, True]


def test_weights_hash_reads_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_llama(tmp_path / "t")
    read: list[str] = []
    plain = ends.hash_file
    monkeypatch.setattr(ends, "hash_file", lambda path: read.append(path.name) or plain(path))
    first = weights_hash(folder)
    assert weights_hash(folder) == first
    assert sorted(read) == ["config.json", "model.safetensors"]
