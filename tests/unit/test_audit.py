"""Whether responses are told to be the target's own: against float64, on its own samples and on another's text."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mtptrain import manifest
from mtptrain.config import Config, DataConfig, DataSource, Device, Dtype, ResponseMode, ResponsesConfig, TargetConfig
from mtptrain.data.documents import TRAIN, Document
from mtptrain.stages import prepare
from mtptrain.stages.audit import sample, score, warning
from mtptrain.target.model import load_model
from mtptrain.target.spec import TargetSpec, read_spec
from tests.unit.tiny import tiny_family, tiny_llama

VOCAB = 320


@pytest.fixture(scope="module", params=["llama", "gemma2", "granite"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, TargetSpec]:
    """With a logit softcap and with a logit scale among them. Its projection is enlarged, so that its choices are clear ones."""
    folder = tiny_family(tmp_path_factory.mktemp("target") / "tiny", request.param)
    weights = load_file(folder / "model.safetensors")
    projection = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    weights[projection] *= 2 if request.param == "gemma2" else 12  # a softcap makes ties of large ones
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return load_model(folder, torch.float32, torch.device("cpu"), False), read_spec(folder)


@torch.inference_mode()
def answered(model: PreTrainedModel, count: int, temperature: float, seed: int) -> list[Document]:
    """Two spans of 10 tokens each, drawn at this temperature; 0 is greedy, inf any token."""
    rng = torch.Generator().manual_seed(seed)
    documents = []
    for n in range(count):
        tokens: list[int] = []
        spans = []
        for _ in range(2):
            tokens += torch.randint(VOCAB, (4,), generator=rng).tolist()
            start = len(tokens)
            for _ in range(10):
                logits = model(torch.tensor([tokens])).logits[0, -1].double()
                if temperature == 0:
                    tokens.append(int(logits.argmax()))
                else:
                    tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)))
            spans.append((start, len(tokens)))
        documents.append(Document(id=str(n), source="s", split=TRAIN, tokens=tokens, spans=spans))
    return documents


@torch.inference_mode()
def by_hand(model: PreTrainedModel, documents: list[Document]) -> tuple[float, float]:
    """Share of first choices and excess, token by token in float64 from transformers' own logits."""
    excess, hits = [], []
    for d in documents:
        log_TV = model(torch.tensor([d.tokens])).logits[0].double().log_softmax(-1)
        for start, end in d.spans:
            for t in range(start, end):
                log_V = log_TV[t - 1]
                excess.append(float(-log_V[d.tokens[t]] + (log_V.exp() * log_V).sum()))
                hits.append(int(log_V.argmax()) == d.tokens[t])
    return sum(hits) / len(hits), sum(excess) / len(excess)


@pytest.mark.parametrize("temperature", [0.0, 1.0, math.inf])
def test_the_figures_are_those_of_the_definition(target: tuple[PreTrainedModel, TargetSpec], temperature: float) -> None:
    model, spec = target
    documents = answered(model, 3, temperature, seed=1)
    found = score(model, spec, documents)
    share, excess = by_hand(model, documents)
    assert (found["documents"], found["tokens"]) == (3, 60)
    assert found["first_choice_share"] == share
    assert found["excess_nats"] == pytest.approx(excess, abs=1e-4)


def test_its_own_words_are_told_from_anothers(target: tuple[PreTrainedModel, TargetSpec]) -> None:
    """Greedy, sampled and random ones. Drawn from p itself, nll - entropy has mean zero."""
    model, spec = target
    greedy, own, foreign = (score(model, spec, answered(model, 12, t, seed=2)) for t in (0.0, 1.0, math.inf))
    assert greedy["first_choice_share"] == 1.0
    assert greedy["excess_nats"] < -0.1
    assert warning(greedy) is None
    assert abs(own["excess_nats"]) < 4 * own["excess_standard_error"]
    assert warning(own) is None
    told = warning(foreign)
    assert told is not None
    assert told.startswith("WARNING: the responses are not this target's own")
    assert "data.responses.mode=target" in told


def test_the_standard_error_is_that_of_a_ratio_over_documents(target: tuple[PreTrainedModel, TargetSpec]) -> None:
    """Every document twice: the same mean, the error of half as many independent documents over the square root of two."""
    model, spec = target
    documents = answered(model, 6, 1.0, seed=3)
    once, twice = score(model, spec, documents), score(model, spec, documents * 2)
    assert twice["excess_nats"] == pytest.approx(once["excess_nats"], abs=1e-6)
    assert twice["excess_standard_error"] == pytest.approx(once["excess_standard_error"] / math.sqrt(2), rel=1e-3)


def test_the_sample_is_spread_over_all_documents() -> None:
    documents = [Document(id=str(n), source="s", split=TRAIN, tokens=[1, 2], spans=[(1, 2)]) for n in range(100)]
    assert [d.id for d in sample(documents, 4)] == ["0", "25", "50", "75"]
    assert len(sample(documents, 1000)) == 100
    assert sample(documents, 0) == []
    assert sample([], 4) == []


def test_fault_11_responses_of_another_model_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole stage on kept responses that no one would say but a byte generator."""
    folder = tiny_llama(tmp_path / "tiny")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij ", k=40)) for _ in range(12)]
    rows = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": w}]} for n, w in enumerate(words)]
    file = tmp_path / "kept.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = Config(
        root=str(tmp_path / "runs"),
        device=Device.cpu,
        threads=1,
        target=TargetConfig(path=str(folder), dtype=Dtype.float32),
        data=DataConfig(
            source=DataSource.files,
            train=[str(file)],
            held_out_fraction=0.0,
            max_length=200,
            responses=ResponsesConfig(mode=ResponseMode.keep, max_new_tokens=24),
        ),
    )
    prepare.run(cfg)
    said = " ".join(capsys.readouterr().out.split())
    assert "scored by the target:" in said
    audit = manifest.require(cfg.data_dir, "", "")["results"]["audit"]
    assert audit["documents"] == 12
    assert audit["anothers"]
    assert "WARNING: the responses are not this target's own" in said
