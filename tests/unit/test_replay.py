"""Engine runs without an engine: hand-made traces against the reference head, cutting, fates of tokens."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtptrain.config import Config, EngineConfig
from mtptrain.decoding.reference import Top
from mtptrain.decoding.replay import Difference, replay_drafts
from mtptrain.decoding.walk import Draft, draft_all_rows
from mtptrain.engines.vllm import Answer, EngineRun, Prompt, Step
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.unroll import Unroll
from mtptrain.stages.engine_trial import NGRAM, run_trials, walks_of
from mtptrain.stages.samples import token_fates
from tests.unit.heads import HIDDEN, VOCAB, bound, small_batch, small_embed, small_head, small_spec

LM_HEAD = LmHead(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9)))


def drafted_by_one_row(row: int, k: int) -> list[int]:
    """The head's own chain from `row`, one row at a time, every drafted token fed back."""
    tokens: list[int] = []
    for _ in range(k):
        tokens.append(int(logits_on_the_way(row, tokens)[-1].argmax()))
    return tokens


def logits_on_the_way(row: int, tokens: list[int]) -> torch.Tensor:
    """The head's logits [K, V] from `row`, fed `tokens`."""
    head, batch = small_head(small_spec()), small_batch([12], [[(3, 12)]], 1)
    unroll = Unroll(bound(head, small_embed()))
    rows = torch.arange(11)
    unroll.extend(batch.token_T[1:], {"final": batch.final_TH[:-1]}, rows, torch.zeros_like(rows))
    states = [unroll.start(torch.tensor([row]))]
    for token in tokens:
        states.append(unroll.advance(torch.zeros(1, dtype=torch.int64), torch.tensor([token])))
    return torch.cat([LM_HEAD.logits(state) for state in states])


def replay(steps: list[Step]) -> tuple[int, int, list[Difference | None]]:
    head, batch = small_head(small_spec()), small_batch([12], [[(3, 12)]], 1)
    agreement, firsts = replay_drafts(bound(head, lm_head=LM_HEAD), batch.token_T, batch.states, steps)
    return agreement.equal, agreement.compared, firsts


ROWS = [2, 3, 5, 9]


def test_whole_chains_are_compared_whether_accepted_or_not() -> None:
    steps = [Step(row, drafted_by_one_row(row, 3), 0) for row in ROWS]
    assert replay(steps) == (12, 12, [None] * 4)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_draft_is_compared_up_to_its_first_difference(depth: int) -> None:
    steps = [Step(row, drafted_by_one_row(row, 3), 0) for row in ROWS]
    token = steps[2].drafted[depth] = (steps[2].drafted[depth] + 1) % VOCAB
    equal, compared, (*before, difference, after) = replay(steps)
    assert (equal, compared, before, after) == (9 + depth, 10 + depth, [None, None], None)
    assert difference is not None
    logits_V = logits_on_the_way(ROWS[2], steps[2].drafted[:depth])[-1]
    assert difference == Difference(depth, pytest.approx(float(logits_V.max() - logits_V[token]), rel=1e-5))


def test_a_token_outside_the_draft_vocabulary_has_no_margin() -> None:
    head, batch, ids_D = small_head(small_spec()), small_batch([12], [[(3, 12)]], 1), torch.tensor([1, 4, 6])
    reduced = bound(head, lm_head=LmHead(LM_HEAD.weight_VH[ids_D], ids_V=ids_D))
    _, (difference,) = replay_drafts(reduced, batch.token_T, batch.states, [Step(5, [2], 0)])
    assert difference == Difference(0, None)


def test_order_empty_and_shorter_drafts() -> None:
    """As n-gram lookup and a shrinking budget leave them; the order of the trace does not matter."""
    steps = [
        Step(9, drafted_by_one_row(9, 2), 1),
        Step(4, [], 0),
        Step(2, drafted_by_one_row(2, 3), 0),
        Step(5, drafted_by_one_row(5, 1), 0),
    ]
    assert replay(steps) == (6, 6, [None] * 4)
    assert replay([Step(4, [], 0)]) == (0, 0, [None])


def test_replayed_first_tokens_are_the_walks() -> None:
    batch = small_batch([12], [[(3, 12)]], 3)
    walk = draft_all_rows(bound(small_head(small_spec()), lm_head=LM_HEAD), batch, 3)
    steps = [Step(int(row), tokens, 0) for row, tokens in zip(walk.row_R, walk.tokens_R, strict=True)]
    equal, compared, firsts = replay(steps)
    assert equal == compared == sum(map(len, walk.tokens_R))
    assert set(firsts) == {None}


def test_a_tie_is_two_units_in_the_last_place_of_the_dtype() -> None:
    near = 1.0 + 2 * 2.0**-23
    assert Top([3, 5], [near, 1.0], bits=23).ties_with(5)
    assert not Top([3, 5], [1.0 + 3 * 2.0**-23, 1.0], bits=23).ties_with(5)
    assert Top([3, 5], [1.0 + 2 * 2.0**-7, 1.0], bits=7).ties_with(5)
    assert not Top([3, 5], [1.0 + 2 * 2.0**-7, 1.0], bits=23).ties_with(5)


class OneDocument:
    """What `walks_of` asks of a store: one document of 10 prompt tokens and a span of 6."""

    class Entry:
        id, source, spans = "d", "s", ((10, 16),)

    entries = (Entry(),)


def test_drafts_are_cut_at_the_end_of_the_answer() -> None:
    """Six tokens: the first from prefill (position 10), then 2 accepted + 1, then 1 accepted of a draft that reaches past the end."""
    answer = Answer([1, 2, 3, 4, 5, 6], True, [Step(9, [2, 3, 9], 2), Step(12, [5, 6, 7], 3)])
    (walk,) = walks_of(EngineRun(answers={"0.0": answer}), OneDocument(), [0])  # type: ignore[arg-type]
    assert walk.drafts == [Draft(9, [2, 3, 9], 2), Draft(12, [5, 6], 2)]
    assert (walk.spans, walk.generated) == (1, 6)


def test_a_step_without_a_draft_counts_as_one_that_accepted_nothing() -> None:
    answer = Answer([1, 2, 3], False, [Step(9, [], 0), Step(10, [3], 1)])
    (walk,) = walks_of(EngineRun(answers={"0.0": answer}), OneDocument(), [0])  # type: ignore[arg-type]
    assert walk.drafts == [Draft(9, [], 0), Draft(10, [3], 1)]


def test_fates_of_tokens() -> None:
    answer = Answer([11, 12, 13, 14, 15, 16], True, [Step(9, [12, 13, 99], 2), Step(12, [15], 1)])
    assert [(token, fate["fate"], fate["depth"], rejected) for token, fate, rejected in token_fates(answer, 10)] == [
        (11, "prefill", None, None),
        (12, "accepted", 1, None),
        (13, "accepted", 2, None),
        (14, "target", None, 99),
        (15, "accepted", 1, None),
        (16, "target", None, None),
    ]
    assert token_fates(dataclasses.replace(answer, tokens=[]), 10) == []


# -- interrupted measurements -----------------------------------------------------------------------------------------


class Engines:
    """Stands in for the engine: runs the jobs it is given one after the other, and dies before the job `dies_at`."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.dies_at: str | None = None

    def answer(self, cfg: object, engine: object, folder: object, jobs: dict[str, object], prompts: list[Prompt]) -> Iterator[object]:
        self.started.append(list(jobs))
        for number, name in enumerate(jobs):
            if name == self.dies_at:
                raise KeyboardInterrupt
            run = EngineRun(tokens=number + 7, seconds=1.5, counters={"drafts": 3}, versions={"vllm": "1"}, speed=[{"batch_size": 1}])
            for prompt in prompts:
                run.answers[prompt.id] = Answer([1, 2], True, [Step(4, [2, 9], 1)])
                yield name, prompt.id, run.answers[prompt.id]
            yield name, run


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    for name, value in {
        "answer": made.answer,
        "weights_hash": lambda _: "target",
        "engine_inputs": lambda *_: {"vllm": "1"},
        "load_template": lambda *_: SimpleNamespace(stop_ids={0}),
        "probes": lambda _: [],
        "_prompts": lambda *_: [Prompt(id="0.0", tokens=[5, 6], max_tokens=4)],
        "llm_arguments": lambda *_: {"max_model_len": 64, "gpu_memory_utilization": random.random()},
    }.items():
        monkeypatch.setattr(f"mtptrain.stages.engine_trial.{name}", value)
    return made


def trials(root: Path, draft: Path) -> dict[str, EngineRun]:
    cfg = Config(root=str(root), engine=EngineConfig(kv_cache_gib=1))
    context = SimpleNamespace(folder=root, spec=None)
    drafts = {"none": None, "head": {"method": "eagle", "model": str(draft)}, "ngram": NGRAM}
    return run_trials(cfg, context, None, drafts, None, [0])  # type: ignore[arg-type]


def test_an_interrupted_measurement_goes_on_with_what_is_left(tmp_path: Path, engines: Engines) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"weights")
    engines.dies_at = "ngram"
    with pytest.raises(KeyboardInterrupt):
        trials(tmp_path, draft)
    engines.dies_at = None
    runs = trials(tmp_path, draft)
    assert engines.started == [["none", "head", "ngram"], ["ngram"]]
    assert list(runs) == ["none", "head", "ngram"]
    assert (runs["head"].tokens, runs["head"].answers["0.0"].steps) == (8, [Step(4, [2, 9], 1)])
    assert trials(tmp_path, draft) == runs
    assert len(engines.started) == 2
    (draft / "model.safetensors").write_bytes(b"others")  # another head: only its run is made again
    trials(tmp_path, draft)
    assert engines.started[2:] == [["head"]]
