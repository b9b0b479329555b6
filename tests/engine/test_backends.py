"""Responses and hidden states by a real vLLM: the same data and the same store as transformers gives, resumed where they stopped."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mtptrain import manifest
from mtptrain.config import Codec, Config, PrecomputeBackend, ResponseBackend
from mtptrain.data.answering import FILE as ANSWERS
from mtptrain.data.documents import read_documents
from mtptrain.data.template import load_template
from mtptrain.engines import vllm
from mtptrain.engines.process import require_engine
from mtptrain.errors import UserError
from mtptrain.stages import precompute, prepare
from mtptrain.stages.rendering import compare, probes
from mtptrain.store.reader import Store
from mtptrain.target.spec import read_spec
from mtptrain.target.tiny import make_tiny_target
from tests.engine.case import make_config

pytestmark = pytest.mark.engine


def with_engine(cfg: Config, name: str) -> Config:
    """The same run by the engine, in a folder of its own."""
    return dataclasses.replace(
        cfg,
        name=name,
        data=dataclasses.replace(cfg.data, responses=dataclasses.replace(cfg.data.responses, backend=ResponseBackend.vllm)),
        precompute=dataclasses.replace(cfg.precompute, backend=PrecomputeBackend.vllm),
    )


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("backends")
    target = make_tiny_target(folder / "target", "llama", hidden_size=128, head_dim=32)
    cfg = make_config(folder, str(target))
    return dataclasses.replace(
        cfg,
        store=dataclasses.replace(cfg.store, shard_tokens=600, codec=Codec.bf16),
        precompute=dataclasses.replace(cfg.precompute, captures=["final", "after_0", "after_2"]),
    )


def test_greedy_answers_are_those_of_transformers_and_a_killed_run_goes_on(cfg: Config) -> None:
    by_engine = with_engine(cfg, "engine")
    prepare.run(cfg)
    prepare.run(by_engine)
    ours, theirs = read_documents(cfg.data_dir), read_documents(by_engine.data_dir)
    assert [(d.id, d.tokens, d.spans) for d in ours] == [(d.id, d.tokens, d.spans) for d in theirs]
    rendered = manifest.require(by_engine.data_dir, "", "")["results"]["rendering"]
    assert rendered["dialogues"] == rendered["equal"] > 10
    rows = [json.loads(line) for line in (by_engine.data_dir / ANSWERS).read_text().splitlines()]
    (by_engine.data_dir / manifest.MANIFEST).unlink()
    (by_engine.data_dir / ANSWERS).write_text("".join(json.dumps(row) + "\n" for row in rows[:5]) + '{"id": "torn')
    prepare.run(by_engine)
    asked = [json.loads(line) for line in (by_engine.data_dir / "engine" / "requests.0.jsonl").read_text().splitlines()]
    assert len(asked) == len(rows) - 5
    assert [d.tokens for d in read_documents(by_engine.data_dir)] == [d.tokens for d in ours]


def test_fault_11_a_prompt_that_the_engine_makes_otherwise_is_told(cfg: Config, tmp_path: Path) -> None:
    """Its tokenizer's template is not the one that the data was prepared with."""
    engine, target = require_engine(cfg, "this test"), Path(cfg.target.path)
    template = load_template(target, False)
    own = probes(template)
    template.tokenizer.chat_template = template.tokenizer.chat_template + " "
    asked = [*own, *probes(template)]
    arguments = vllm.llm_arguments(cfg, target, read_spec(target), 64)
    generator = vllm.VllmGenerator(cfg, engine, tmp_path / "job", arguments, [2], [a.asked() for a in asked])
    assert len([c for done in generator.run([vllm.Request("r", [1, 5])], 4, 0.0, 1.0) for c in done]) == 1
    generator.close()
    found = compare(asked, generator.rendered)
    assert found is not None
    assert (found["dialogues"], found["equal"]) == (len(asked), len(own))
    assert f"makes other prompts of {len(own)} of {len(asked)} dialogues: of 'Why is the sky blue?' it has nothing where" in found["told"]


def test_sampled_answers_belong_to_their_request(cfg: Config, tmp_path: Path) -> None:
    """Whatever else is generated at the same time, and though one step does not hold all prompts."""
    engine = require_engine(cfg, "this test")
    target = Path(cfg.target.path)
    arguments = vllm.llm_arguments(cfg, target, read_spec(target), 64) | {"max_num_batched_tokens": 80}
    generator = vllm.VllmGenerator(cfg, engine, tmp_path / "job", arguments, [2])
    requests = [vllm.Request(f"r{i}", [1, 5 + i, *range(9, 37)]) for i in range(6)]
    together = {c.id: c.tokens for done in generator.run(requests, 12, 1.0, 0.9) for c in done}
    alone = {c.id: c.tokens for r in requests[:2] for done in generator.run([r], 12, 1.0, 0.9) for c in done}
    generator.close()
    assert set(together) == {r.id for r in requests}
    assert alone == {name: together[name] for name in alone}
    assert len({tuple(tokens) for tokens in together.values()}) == 6


def test_the_engines_store_is_transformers_store_up_to_rounding(cfg: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunked prefill: 48 tokens a step, so that every document is computed in several pieces."""
    by_engine = with_engine(cfg, "engine")
    small = dataclasses.replace(
        by_engine,
        engine=dataclasses.replace(cfg.engine, batch_size=8),
        precompute=dataclasses.replace(by_engine.precompute, batch_tokens=48),
    )
    for each in (cfg, small):
        prepare.run(each)
        precompute.run(each)
    assert "engine against transformers, 4 documents" in capsys.readouterr().out
    ours, theirs = (Store.open(c.store_dir, cfg.precompute.captures) for c in (cfg, small))
    assert [e.id for e in ours.entries] == [e.id for e in theirs.entries]
    for i, entry in enumerate(ours.entries):
        assert torch.equal(ours.tokens(i), theirs.tokens(i))
        for capture in cfg.precompute.captures:
            a, b = ours.state(i, capture).double(), theirs.state(i, capture).double()
            assert a.shape == (entry.length, 128)
            # two roundings of nearly the same float32 to bfloat16 differ by at most one unit in the last place
            assert float(((a - b).abs() / a.abs().clamp_min(1e-2)).max()) <= 2**-7


def test_an_engine_that_cannot_load_the_target_gives_one_line_and_its_log(cfg: Config, tmp_path: Path) -> None:
    engine = require_engine(cfg, "this test")
    job = {"kind": "answer", "llm": {"model": str(tmp_path / "nowhere")}, "stop_ids": []}
    with pytest.raises(UserError, match=r"the engine failed in its answer run: .*\(log: .*engine\.log\)") as caught:
        list(vllm.run_engine(cfg, engine, tmp_path / "job", {"answer": job}, []))
    assert "\n" not in str(caught.value)
    assert (tmp_path / "job" / "engine.log").stat().st_size > 0
