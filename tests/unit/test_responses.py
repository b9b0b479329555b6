"""Continuous batching against transformers' own `generate`, one sequence at a time, in float32."""

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from mtptrain.data import responses
from mtptrain.data.responses import Completed, HfGenerator, Request
from mtptrain.errors import UserError

VOCAB = 53
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
WINDOW = 6
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=0.5)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=["sliding_attention"] * 2 + ["full_attention"]
        )
    ),
}
STOP_IDS = [3, 7, 11, 19]


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def make_requests(count: int, prefix: list[int]) -> list[Request]:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 24, (count,), generator=g).tolist()
    return [Request(f"r{i}", prefix + torch.randint(20, VOCAB, (n,), generator=g).tolist()) for i, n in enumerate(lengths)]


def alone(model: PreTrainedModel, request: Request, limit: int, stop_ids: list[int]) -> list[int]:
    ids = torch.tensor([request.prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, eos_token_id=stop_ids or None, pad_token_id=0
    )
    return out[0, len(request.prompt) :].tolist()


def generator(model: PreTrainedModel, **overrides: Any) -> HfGenerator:
    options: dict[str, Any] = {"batch_size": 4, "max_new_tokens": 20, "temperature": 0.0, "top_p": 1.0, "seed": 0, **overrides}
    return HfGenerator(model, STOP_IDS, **options)


def collect(made: HfGenerator, requests: list[Request]) -> dict[str, Completed]:
    batches = list(made.run(requests))
    assert all(batches)
    done = [c for batch in batches for c in batch]
    assert Counter(c.id for c in done) == Counter(r.id for r in requests)
    return {c.id: c for c in done}


@pytest.mark.parametrize("prefix", [[], [21, 22, 23, 24, 25, 26, 27, 28, 29]], ids=["no prefix", "prefix"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_one_at_a_time(name: str, prefix: list[int]) -> None:
    model, requests = build(name), make_requests(13, prefix)
    own_attention = model.config._attn_implementation
    done = collect(generator(model), requests)
    expected = {r.id: alone(model, r, 20, STOP_IDS) for r in requests}
    assert {id: c.tokens for id, c in done.items()} == expected
    assert {id for id, c in done.items() if c.hit_limit} == {id for id, tokens in expected.items() if tokens[-1] not in STOP_IDS}
    assert len({tuple(t) for t in expected.values()}) > 10, "outputs must differ, or the test shows nothing"
    assert len({len(t) for t in expected.values()}) > 2, "sequences must end at different times, or no slot is refilled"
    assert model.config._attn_implementation == own_attention


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 64}, {"cache_bytes": 12_000}, {"batch_size": 2, "max_new_tokens": 1}], ids=str
)
def test_output_does_not_depend_on_batching(options: dict[str, Any]) -> None:
    model, requests = build("llama"), make_requests(9, [])
    limit = options.get("max_new_tokens", 20)
    done = collect(generator(model, **options), requests)
    assert {id: c.tokens for id, c in done.items()} == {r.id: alone(model, r, limit, STOP_IDS) for r in requests}


def test_prompts_are_spread_over_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_PREFILL_TOKENS", 10)
    model, requests = build("gemma3"), make_requests(9, [])
    assert max(len(r.prompt) for r in requests) > 10
    done = collect(generator(model), requests)
    assert {id: c.tokens for id, c in done.items()} == {r.id: alone(model, r, 20, STOP_IDS) for r in requests}


def test_cache_growth_keeps_what_is_cached() -> None:
    model = build("qwen3")
    requests = [Request("short", [30]), Request("long", list(range(20, 50)))]
    made = HfGenerator(model, [], batch_size=2, max_new_tokens=90, temperature=0.0, top_p=1.0, seed=0)
    done = collect(made, requests)
    assert {id: c.tokens for id, c in done.items()} == {r.id: alone(model, r, 90, []) for r in requests}


def test_equal_prompts_and_no_requests() -> None:
    model = build("llama")
    assert list(generator(model).run([])) == []
    twins = [Request(i, [30, 31, 32]) for i in "abc"]
    assert {tuple(c.tokens) for c in collect(generator(model), twins).values()} == {tuple(alone(model, twins[0], 20, STOP_IDS))}


def test_response_ends_at_the_context_limit() -> None:
    model = build("llama")
    made = HfGenerator(model, [], batch_size=2, max_new_tokens=50, temperature=0.0, top_p=1.0, seed=0)
    done = collect(made, [Request("near", [20] * 118), Request("far", [20] * 10)])
    assert (len(done["near"].tokens), done["near"].hit_limit) == (10, True)
    assert len(done["far"].tokens) == 50
    with pytest.raises(UserError, match=r"prompt full has 128 tokens, must have 1 to 127"):
        list(made.run([Request("full", [20] * 128)]))


def test_longrope_ends_before_its_frequencies_change() -> None:
    """Beyond the original length one long sequence would change what the others' tokens mean."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=32)).eval()
    requests = [Request("short", [30, 31]), Request("long", list(range(20, 46)))]
    made = HfGenerator(model, [], batch_size=2, max_new_tokens=20, temperature=0.0, top_p=1.0, seed=0)
    done = collect(made, requests)
    assert {id: len(c.tokens) for id, c in done.items()} == {"short": 20, "long": 6}
    assert {id: c.tokens for id, c in done.items()} == {r.id: alone(model, r, len(done[r.id].tokens), []) for r in requests}


def test_unsupported_attention_is_refused() -> None:
    config = Qwen3NextConfig(**{**SIZES, "num_hidden_layers": 2}, layer_types=["linear_attention", "full_attention"], num_experts=2)
    with pytest.raises(UserError, match="qwen3_next has layers of type linear_attention"):
        generator(Qwen3NextForCausalLM(config))


def test_sampling_depends_on_seed_and_id_only() -> None:
    model, requests = build("llama"), make_requests(9, [])
    hot: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
    wide = {id: c.tokens for id, c in collect(generator(model, **hot, batch_size=9), requests).items()}
    narrow = {id: c.tokens for id, c in collect(generator(model, **hot, batch_size=2), requests[::-1]).items()}
    other = {id: c.tokens for id, c in collect(generator(model, **hot, seed=1), requests).items()}
    assert wide == narrow
    assert sum(wide[id] != other[id] for id in wide) > 4


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (1.5, 0.3), (1.0, 1e-6)])
def test_sampled_frequencies_are_those_of_the_nucleus(temperature: float, top_p: float) -> None:
    """Chi-square against the nucleus by definition: sorted, kept until the mass before an id reaches top_p."""
    import random

    logits = torch.tensor([2.0, -1.0, 1.5, 0.0, 1.0, -3.0, 0.5, 1.9], dtype=torch.float64)
    p = torch.softmax(logits / temperature, 0)
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    expected = torch.zeros_like(p)
    expected[order[before < top_p]] = p[order[before < top_p]]
    expected /= expected.sum()

    rng, rows, rounds = random.Random(0), 1000, 20
    counts: Counter[int] = Counter()
    for _ in range(rounds):
        counts.update(responses.sample(logits.float().expand(rows, -1), temperature, top_p, [rng] * rows))
    drawn = torch.tensor([counts[i] for i in range(len(p))], dtype=torch.float64)
    assert (drawn[expected == 0] == 0).all()
    inside = expected > 0
    chi_square = ((drawn - expected * rows * rounds)[inside] ** 2 / (expected * rows * rounds)[inside]).sum()
    assert chi_square < 24.3  # the 99.9 % point for 7 degrees of freedom
