"""plan: sizes against values worked out by hand and against published parameter counts; the refusal by free disk space."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from mtptrain import cli, sizes
from mtptrain.cli import compose
from mtptrain.config import Config, DeepSpeedConfig, HeadConfig, NormsConfig
from mtptrain.data.documents import Document, write_documents
from mtptrain.errors import UserError
from mtptrain.estimate import SizeUnknown, Stage, estimate, known_spec, volume
from mtptrain.hardware import GPUS, predict, scaling
from mtptrain.heads.build import build_head
from mtptrain.manifest import finish
from mtptrain.stages import plan as stage
from mtptrain.stages.plan import duration, free_bytes, refuse_if_it_cannot_fit, seconds, size
from mtptrain.store.codecs import INT8
from mtptrain.store.writer import StoreWriter
from mtptrain.target.spec import TargetSpec, full_config, read_config, read_spec
from tests.unit.tiny import tiny_family

GIB = 2**30
FREE = "mtptrain.stages.plan.free_bytes"
TINY = TargetSpec(
    model_type="llama",
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=320,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)


def _config(*overrides: str) -> Config:
    """Of an mtp head, whose closed forms are these."""
    return compose(("head=mtp", *overrides))[0]


@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        ("smollm2", 134_515_008),
        ("llama1b", 1_235_814_400),
        ("llama8b", 8_030_261_248),
        ("llama70b", 70_553_706_496),
        ("qwen3-8b", 8_190_735_360),
        ("deepseek-v2-lite", 15_706_484_224),
    ],
)
def test_target_parameters_are_the_published_ones(recipe: str, published: int) -> None:
    assert sizes.target_parameters(known_spec(_config(f"+recipe={recipe}"))) == published


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_target_parameters_are_those_of_the_model(tmp_path: Path, model_type: str) -> None:
    folder = tiny_family(tmp_path / "target", model_type)
    spec = read_spec(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(full_config(read_config(folder)))
    assert sizes.target_parameters(spec) == sum(p.numel() for p in model.parameters())
    dense = spec.experts is None
    assert (sizes.layers_parameters(spec, active=True) == sizes.layers_parameters(spec)) is dense


def test_a_token_of_deepseek_v2_lite_is_multiplied_with_what_is_published() -> None:
    """2.4 billion of its 15.7: the layers' and lm_head's."""
    spec = known_spec(_config("+recipe=deepseek-v2-lite"))
    assert sizes.layers_parameters(spec, active=True) + spec.vocab_size * spec.hidden_size == pytest.approx(2.4e9, rel=0.03)
    # of its 26 layers with experts, 58 of 64 are not for this token
    idle = 26 * (64 - 6) * 3 * 2048 * 1408
    assert sizes.layers_parameters(spec) - sizes.layers_parameters(spec, active=True) == idle


def test_head_parameters_by_hand() -> None:
    smollm2 = known_spec(_config("+recipe=smollm2"))
    # W 2*576*576; q, o 576*576 each; k, v 576*192 each; gate, up, down 576*1536 each; five norms of 576
    assert sizes.head_parameters(HeadConfig(), smollm2) == 663_552 + 2 * 331_776 + 2 * 110_592 + 3 * 884_736 + 5 * 576 == 4_205_376
    llama70b = known_spec(_config("+recipe=llama70b"))
    # W 2*8192^2; q, o 8192^2; k, v 8192*1024; gate, up, down 8192*28672; five norms of 8192
    by_hand = 134_217_728 + 2 * 67_108_864 + 2 * 8_388_608 + 3 * 234_881_024 + 40_960
    assert sizes.head_parameters(HeadConfig(), llama70b) == by_hand == 989_896_704


def test_head_options_change_its_parameters() -> None:
    spec = known_spec(_config("+recipe=smollm2"))
    base = sizes.head_parameters(HeadConfig(), spec)
    assert sizes.head_parameters(HeadConfig(norms=NormsConfig(embed=False, output=False)), spec) == base - 2 * 576
    assert sizes.head_parameters(HeadConfig(attention_bias=True), spec) == base + 576 + 192 + 192
    assert sizes.head_parameters(HeadConfig(qk_norm=True), spec) == base + 2 * 64


@settings(deadline=None, max_examples=30)
@given(
    sizes_=st.tuples(st.sampled_from([32, 64]), st.sampled_from([48, 96]), st.sampled_from([1, 2, 4])),
    bias=st.booleans(),
    qk_norm=st.booleans(),
    norms=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_head_parameters_are_those_of_the_module(sizes_: tuple[int, int, int], bias: bool, qk_norm: bool, norms: list[bool]) -> None:
    hidden, intermediate, kv = sizes_
    spec = dataclasses.replace(TINY, hidden_size=hidden, intermediate_size=intermediate, num_kv_heads=kv)
    flags = dict(zip(("embed", "hidden", "input", "post_attention", "output"), norms, strict=True))
    config = HeadConfig(attention_bias=bias, qk_norm=qk_norm, norms=NormsConfig(**flags))
    assert sizes.head_parameters(config, spec) == sum(p.numel() for p in build_head(config, spec).parameters())


def test_store_bytes_by_hand() -> None:
    cfg = _config("+recipe=smollm2", "plan.train_tokens=1000000")
    # 576 bytes, a float32 scale, 36 outliers in bf16, an int32 id and a mask byte
    assert estimate(cfg).bytes_per_token == 576 + 4 + 2 * 36 + 4 + 1 == 657
    assert estimate(cfg).store_bytes == 657_000_000
    whole = _config("+recipe=smollm2", "plan.train_tokens=1000000", "store.codec=bf16")
    assert estimate(whole).bytes_per_token == 2 * 576 + 4 + 1 == 1157
    two = _config("+recipe=llama70b", "plan.train_tokens=1000000", "precompute.captures=[final,after_39]", "store.aux_codec=int4")
    # int4: half a byte and a 32nd of a bf16 scale a channel, a 16th of them in bf16
    assert estimate(two).bytes_per_token == (8192 + 4 + 2 * 512) + (4096 + 2 * 256 + 2 * 512) + 5
    lookup = compose(("+recipe=smollm2", "plan.train_tokens=1000000"))[0]
    assert estimate(lookup).bytes_per_token == 4 * (576 + 4 + 2 * 36) + 5 == 2613


def test_store_bytes_are_those_of_a_written_store(tmp_path: Path) -> None:
    document = Document(id="a", source="s", split="train", tokens=list(range(1000)), spans=[(10, 1000)])
    StoreWriter(tmp_path, "f", INT8).write(0, [document], {"final": torch.zeros(1000, 64, dtype=torch.bfloat16)})
    written = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    expected = 1000 * sizes.stored_bytes_per_token(Config().store, ["final"], known_spec(_config("+recipe=tiny")))
    assert expected <= written < expected + 1000  # two headers


def test_online_training_stores_two_groups_of_shards_and_what_is_held_out() -> None:
    given = (
        "+recipe=llama8b",
        "plan.train_tokens=100000000",
        "train.online=true",
        "store.shard_tokens=50000",
        "data.held_out_fraction=0.01",
    )
    plan = estimate(_config(*given, "train.shuffle_shards=5"))
    assert plan.store_bytes == (1_000_000 + 2 * 5 * 50_000) * plan.bytes_per_token
    assert estimate(_config(*given)).store_bytes == (1_000_000 + 2 * 4 * 50_000) * plan.bytes_per_token


def test_checkpoint_and_export_bytes_by_hand() -> None:
    plan = estimate(_config("+recipe=smollm2", "train.keep=2"))
    # two kept, the best, and the one being written: float32 weights and two moments
    assert plan.checkpoint_bytes == 4 * 3 * 4 * 4_205_376
    assert plan.export_bytes == 2 * 4_205_376
    assert estimate(_config("+recipe=smollm2", "train.ema=0.99")).checkpoint_bytes == 4 * 4 * 4 * 4_205_376


def test_memory_by_hand() -> None:
    cfg = _config(
        "+recipe=llama70b", "plan.train_tokens=1000000", "target.dtype=bfloat16", "train.dtype=bfloat16", "train.loss.vocabulary=null"
    )
    plan = estimate(cfg)
    weights = 2 * 70_553_706_496
    assert weights < plan.stages["precompute"].memory < weights + 16 * GIB
    # keys and values of 80 layers of 8 heads of 128 in bf16: 327,680 bytes a token, for 256 sequences of about 2,000 tokens
    assert sizes.kv_bytes_per_token(plan.spec, 2) == 327_680
    cache = 256 * 327_680 * (plan.volume.tokens // plan.volume.documents + 1024)
    assert abs(plan.stages["prepare"].memory - weights - cache) < GIB
    # embeddings and lm_head in bf16, and 18 bytes a head parameter (float32 weights, gradients, two moments; a bf16 copy)
    fixed = 2 * 2 * 128_256 * 8192 + 18 * 989_896_704
    logits = 3 * 512 * 128_256 * 4
    assert fixed + logits < plan.stages["train"].memory < fixed + logits + 16 * GIB
    assert plan.stages["train"].memory < weights / 2


def test_memory_grows_with_chunks_not_with_vocabulary_times_tokens() -> None:
    def memory(*overrides: str) -> int:
        return estimate(_config("+recipe=llama8b", "plan.train_tokens=1000000", *overrides)).stages["train"].memory

    assert memory("train.loss.chunk_rows=1024") - memory("train.loss.chunk_rows=512") == 512 * 128_256 * 4 * 3
    assert memory("train.loss.vocabulary=8192") == memory() - 512 * (128_256 - 8192) * 4 * 3


def test_work_by_hand() -> None:
    cfg = _config("+recipe=smollm2", "plan.train_tokens=1000000", "train.steps=3", "train.epochs=2", "train.loss.vocabulary=8192")
    plan = estimate(cfg)
    layers = 30 * (2 * 331_776 + 2 * 110_592 + 3 * 884_736 + 2 * 576)
    assert plan.stages["precompute"].flops == 2 * layers * 1e6
    supervised = plan.volume.generated / 1e6
    assert plan.trained_tokens == 2_000_000
    assert plan.stages["train"].flops == pytest.approx(2e6 * 3 * (6 * 4_205_376 + 6 * 8192 * 576 * supervised))


def test_validation_work_by_hand() -> None:
    plan = estimate(_config("+recipe=tiny", "validate.reference_documents=10", "validate.k=2"))
    # decoded twice, three quarters of 24 tokens; a forward of 3 layers and lm_head, and two drafts of head and lm_head
    layers = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    assert plan.stages["validate"].tokens == 2 * 10 * 18
    assert plan.stages["validate"].flops == 360 * 2 * (layers + 320 * 64 + 2 * (45_376 + 320 * 64))
    assert estimate(_config("+recipe=tiny", "validate.measure=[walk]")).stages["validate"].flops == 0


def test_updates_bound_the_trained_tokens() -> None:
    cfg = _config("+recipe=smollm2", "train.max_updates=10", "train.batch_tokens=2048", "train.accumulate=2")
    assert estimate(cfg).trained_tokens == 10 * 2048 * 2


def test_time_from_given_rates_or_from_work() -> None:
    assert seconds(Stage(memory=0, flops=1e12, rows=8, tokens=500, tokens_per_second=50.0), {}) == 10.0
    assert seconds(Stage(memory=0, flops=1e12, rows=8, tokens=500), {8: 1e11}) == 10.0
    cfg = _config("+recipe=smollm2", "plan.generate_tokens_per_second=79", "plan.precompute_tokens_per_second=500")
    stages = estimate(cfg).stages
    assert (stages["prepare"].tokens_per_second, stages["precompute"].tokens_per_second) == (79, 500)


def test_measured_rate_is_that_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _config("+recipe=smollm2", "device=cpu", "target.dtype=float32")
    clock = itertools.count(0.0, 0.01)  # every reading is 10 ms after the one before it
    monkeypatch.setattr(stage.time, "perf_counter", lambda: next(clock))
    assert stage.measure_flops_per_second(cfg, known_spec(cfg), 256) == pytest.approx(2 * 256 * 576 * 1536 / 0.01)
    given = _config("+recipe=smollm2", "plan.matmul_tflops=0.5")
    assert stage.measure_flops_per_second(given, known_spec(cfg), 256) == 0.5e12


def test_tokens_are_counted_where_data_is_prepared(tmp_path: Path) -> None:
    cfg = _config("+recipe=tiny", f"root={tmp_path}")
    documents = [Document(id=str(n), source="s", split="train", tokens=[0] * n, spans=[(1, n)]) for n in (10, 20, 33)]
    write_documents(cfg.data_dir, documents)
    assert volume(cfg).basis == "estimated from data.*"
    finish(cfg.data_dir, {}, {"all": {"documents": 3, "tokens": 63, "supervised_tokens": 60}})
    counted = volume(cfg)
    assert (counted.documents, counted.tokens, counted.supervised, counted.generated) == (3, 63, 60, 0)


def test_records_of_a_file_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "x" * 387}) + "\n" for _ in range(50)) + "\n", encoding="utf-8")
    cfg = _config("+recipe=tiny", "data.source=files", "data.limit=null", f"data.train=['{file}']")
    amount = volume(cfg)
    # 400 bytes a line are 100 tokens, and three quarters of 24 are generated
    assert (amount.documents, amount.tokens, amount.generated) == (50, 50 * (100 + 18), 50 * 18)
    cfg.data.responses.temperature, cfg.data.responses.samples = 1.0, 3
    assert (volume(cfg).documents, volume(cfg).generated) == (150, 150 * 18)
    keeps = volume(_config("+recipe=tiny", "data.source=files", "data.limit=null", f"data.train=['{file}']", "data.responses.mode=keep"))
    assert (keeps.tokens, keeps.generated) == (5000, 0)


@pytest.mark.parametrize(
    "content", ['[{"prompt": "a"}, {"prompt": "b"}]', '\ufeff [{"prompt": "a"},\n{"prompt": "b"}]', '{"prompt": "a"}\n\n{"prompt": "b"}']
)
def test_a_json_file_may_hold_an_array_or_lines(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content, encoding="utf-8")
    assert volume(_config("+recipe=tiny", "data.source=files", "data.limit=null", f"data.train=['{tmp_path}/p.json']")).documents == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.json", b"[1, ", "is not one JSON array"),
        ("p.json", b"[\xff", "is not one JSON array"),
        ("p.parquet", b"PAR1", "is not a readable Parquet file"),
        ("p.jsonl", None, "does not exist"),
    ],
)
def test_fault_13_a_damaged_data_file_is_one_line_before_anything_is_spent(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} {said}"):
        volume(_config("+recipe=tiny", "data.source=files", f"data.train=['{tmp_path / name}']"))


def test_unknown_sizes_are_said_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SizeUnknown, match=r"data\.limit="):
        estimate(_config("+recipe=llama8b", "data.limit=null"))
    with pytest.raises(SizeUnknown, match=r"target\.path=org/model"):
        estimate(_config("target.path=org/model"))
    refuse_if_it_cannot_fit(_config("target.path=org/model"))
    assert capsys.readouterr().out.startswith("disk not checked yet: target.path=org/model")


def test_a_target_in_the_cache_needs_no_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"model_type": "llama", **_config("+recipe=llama8b").target.shape}
    (tmp_path / "targets" / "toy-1.0-0123456789ab").mkdir(parents=True)
    (tmp_path / "targets" / "toy-1.0-0123456789ab" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path))
    assert sizes.target_parameters(known_spec(_config("target.path='pypi:toy==1.0'"))) == 8_030_261_248
    with pytest.raises(SizeUnknown):
        known_spec(_config("target.path='pypi:toy==1.1'"))
    local = tmp_path / "targets" / "toy-1.0-0123456789ab"
    assert known_spec(_config(f"target.path='{local}'")).num_layers == 32


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _config("+recipe=smollm2", f"root={tmp_path}", "plan.train_tokens=1000000")
    needed = 657_000_000 + 48 * 4_205_376 + 2 * 4_205_376 + 65_536 * 657
    monkeypatch.setattr(FREE, lambda folder: needed)
    refuse_if_it_cannot_fit(cfg)
    monkeypatch.setattr(FREE, lambda folder: needed - 1)
    with pytest.raises(UserError) as refusal:
        refuse_if_it_cannot_fit(cfg)
    assert str(refusal.value).startswith(f"root={tmp_path}: the run needs 868.2 MiB more on disk (store 626.6 MiB, checkpoints 192.5 MiB)")
    assert "\n" not in str(refusal.value)
    cfg.store_dir.mkdir(parents=True)
    (cfg.store_dir / "00000.final.safetensors").write_bytes(b"x" * 100)
    refuse_if_it_cannot_fit(cfg)  # what a resumed run has written is there already


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b" / "c") == pytest.approx(free_bytes(tmp_path), rel=0.1)


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536 * 1024, 3 * GIB, 5000 * GIB)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "3.0 GiB",
        "4.9 TiB",
    ]
    assert [duration(s) for s in (5, 119, 120, 7200, 400_000)] == ["5 s", "119 s", "2.0 min", "2.0 h", "4.6 days"]


def test_other_machines_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """70B on eight H100: 141.1 GB of weights are more than three quarters of two, so four hold a copy."""
    cfg = _config("+recipe=llama70b", "plan.train_tokens=48_000_000", "plan.efficiency=0.5")
    made = estimate(cfg, auto_bytes=2)
    gpu = GPUS["h100"]
    run = predict(cfg, made, gpu, 8)
    assert (run.tensor_parallel, run.gpus) == (4, 8)
    load = 120 + 2 * 70_553_706_496 / 2e9
    assert run.seconds["precompute"] == pytest.approx(load + made.stages["precompute"].flops / (989e12 * 0.5 * 8))
    head = made.head_parameters
    assert run.sum_bytes == pytest.approx(2 * 7 / 8 * 4 * head)
    assert run.updates == made.trained_tokens // (4096 * 8)
    assert run.seconds["train"] == pytest.approx(
        120 + made.stages["train"].flops / (989e12 * 0.5 * 8) + run.updates * run.sum_bytes / (0.6 * 450e9)
    )
    assert run.memory["train"] == made.stages["train"].memory
    sharded = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, deepspeed=DeepSpeedConfig(stage=2)))
    assert run.memory["train"] - predict(sharded, made, gpu, 8).memory["train"] == pytest.approx(12 * head * 7 / 8)
    with pytest.raises(UserError, match=r"141 GB, need 4"):
        predict(cfg, made, gpu, 2)
    times = scaling(cfg, made, gpu)
    assert list(times) == [8, 64, 512]
    assert times[8] > times[64] > times[512]


def test_a_batch_that_does_not_fit_is_cut_to_what_does() -> None:
    """8 x 4090 hold a 70B in 24 GB each: what 90 % of 192 GB leaves beside 141.1 GB, at 327,680 bytes a token."""
    cfg = _config("+recipe=llama70b")
    made = estimate(cfg, auto_bytes=2)
    run = predict(cfg, made, GPUS["rtx4090"], 8)
    context = made.volume.tokens / made.volume.documents
    fits = int((0.9 * 192e9 - 2 * 70_553_706_496) / (context * 327_680))
    assert fits < cfg.data.responses.batch_size
    assert run.memory["prepare"] == pytest.approx((2 * 70_553_706_496 + fits * context * 327_680) / 8)


def test_unknown_hardware_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(stage.run, "plan", ["+recipe=llama8b", "plan.hardware=h900"]) == 2
    assert "there are: a100, h100" in capsys.readouterr().err
