"""Expected acceptance of sampling against a float64 re-derivation, and cases with a known answer."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtptrain.data.documents import HELD_OUT, Document
from mtptrain.decoding.expected import ExpectedAcceptance, acceptance_of_rows, expected_by_step, expected_length
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.unroll import rows_of
from mtptrain.stages import walk
from mtptrain.stages.context import Context
from mtptrain.store.reader import Store
from mtptrain.target.ends import TargetEnds
from tests.unit.heads import EPS, HIDDEN, THETA, VOCAB, bound, small_batch, small_embed, small_head, small_spec
from tests.unit.rederive import Mtp64
from tests.unit.stores import make_store, random_documents, random_state

LENGTHS, SPANS = [13, 9], [[(3, 7), (8, 13)], [(1, 9)]]


def rederived(
    head: Mtp64, embed: Tensor, tokens: list[int], finals: Tensor, spans: Sequence[tuple[int, int]], k: int
) -> list[list[tuple[float, float]]]:
    """For each step, (p(argmax q), sum min(p, q)) of every valid row: tokens p+1 .. p+2+step in one span."""
    found: list[list[tuple[float, float]]] = [[] for _ in range(k)]
    for start, end in spans:
        for p in range(max(start - 1, 0), end - 2):
            steps = min(k, end - p - 2)
            for step, state in enumerate(head.draft_states(embed, tokens, finals, p, steps)):
                target = torch.softmax(embed.double() @ finals[p + 1 + step].double(), 0)
                draft = torch.softmax(embed.double() @ state, 0)
                found[step].append((float(target[draft.argmax()]), float(torch.minimum(target, draft).sum())))
    return found


def means(found: list[list[tuple[float, float]]], which: int) -> list[float]:
    return [sum(row[which] for row in rows) / len(rows) for rows in found]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_rates_equal_the_float64_rederivation(chunk: int) -> None:
    embed, head = small_embed(), small_head(small_spec())
    independent = Mtp64(head.state_dict(), heads=4, kv_heads=2, head_dim=4, eps=EPS, theta=THETA)
    batch = small_batch(LENGTHS, SPANS, 4)
    total = expected_by_step(bound(head), batch, LmHead(embed), 3, chunk)
    parts = zip(batch.token_T.split(LENGTHS), batch.final_TH.split(LENGTHS), SPANS, strict=True)
    by_document = [rederived(independent, embed, t.tolist(), f, s, 3) for t, f, s in parts]
    found = [first + second for first, second in zip(*by_document, strict=True)]
    assert total.rows_K.tolist() == [len(rows) for rows in found] == [3 + 4 + 7, 2 + 3 + 6, 1 + 2 + 5]
    assert total.greedy_rates == pytest.approx(means(found, 0), rel=2e-5)
    assert total.sampled_rates == pytest.approx(means(found, 1), rel=2e-5)


def test_a_batch_of_two_documents_is_the_sum_of_both() -> None:
    embed, head = small_embed(), small_head(small_spec())
    both, total = small_batch(LENGTHS, SPANS, 3), ExpectedAcceptance.zeros(3)
    for first, length, spans in ((0, 13, SPANS[0]), (13, 9, SPANS[1])):
        one = small_batch([length], [spans], 3)
        one.token_T, one.states = both.token_T[first : first + length], rows_of(both.states, slice(first, first + length))
        total.add(expected_by_step(bound(head), one, LmHead(embed), 3, 100))
    packed = expected_by_step(bound(head), both, LmHead(embed), 3, 100)
    torch.testing.assert_close(packed.greedy_K, total.greedy_K, rtol=1e-6, atol=0)
    torch.testing.assert_close(packed.sampled_K, total.sampled_K, rtol=1e-6, atol=0)


def test_a_draft_equal_to_the_target_is_accepted_surely_if_sampled_and_with_its_mode_if_greedy() -> None:
    generator = torch.Generator().manual_seed(0)
    state_SH = torch.randn(50, HIDDEN, generator=generator)
    lm_head = LmHead(small_embed(), scale=0.5, softcap=3.0)
    greedy_S, sampled_S = acceptance_of_rows(state_SH, torch.arange(50), state_SH, lm_head, lm_head, 7)
    torch.testing.assert_close(sampled_S, torch.ones(50), rtol=0, atol=1e-6)
    torch.testing.assert_close(greedy_S, lm_head.logits(state_SH).softmax(-1).max(-1).values, rtol=1e-6, atol=0)


def test_uniform_distributions_over_a_power_of_two_give_exact_rates() -> None:
    head = small_head(small_spec())
    flat = LmHead(torch.zeros(32, HIDDEN))
    total = expected_by_step(bound(head, lm_head=flat), small_batch(LENGTHS, SPANS, 3), flat, 3, 4)
    assert total.greedy_rates == [1 / 32] * 3
    assert total.sampled_rates == [1.0] * 3


def test_two_tokens_in_closed_form() -> None:
    """p = (3/4, 1/4), q = (1/4, 3/4): the draft's argmax has p = 1/4, the overlap is 1/2."""
    lm_head = LmHead(torch.eye(2))
    teacher_TH, state_SH = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.25, 0.75]]).log()
    greedy_S, sampled_S = acceptance_of_rows(state_SH, torch.tensor([0]), teacher_TH, lm_head, lm_head, 1)
    assert (float(greedy_S), float(sampled_S)) == (pytest.approx(0.25, rel=1e-6), pytest.approx(0.5, rel=1e-6))


def test_logits_never_hold_more_rows_than_a_chunk_and_steps_share_their_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    plain = LmHead.logits

    def logits(self: LmHead, rows: Tensor) -> Tensor:
        held.append(len(rows))
        return plain(self, rows)

    monkeypatch.setattr(LmHead, "logits", logits)
    embed = small_embed()
    expected_by_step(bound(small_head(small_spec())), small_batch(LENGTHS, SPANS, 3), LmHead(embed), 3, 5)
    assert max(held) == 5
    drafted = 14 + 11 + 8
    assert len(held) == 2 * -(-drafted // 5)
    assert sum(held) < 2 * drafted


def test_expected_length_is_one_plus_the_sum_of_products() -> None:
    assert expected_length([0.5, 0.5, 0.25]) == 1 + 0.5 + 0.25 + 0.0625
    assert expected_length([0.0, 1.0]) == 1.0
    assert expected_length([0.5, None]) is None


def small_context(folder: Path) -> Context:
    spec, embed = small_spec(), small_embed()
    ends = TargetEnds(spec, embed, torch.ones(HIDDEN), embed)
    return Context(folder, spec, ends, LmHead(embed), torch.device("cpu"), torch.float32)


def test_the_stage_takes_the_mean_over_all_rows_of_all_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "_BATCH_TOKENS", 16)  # several batches of unequal numbers of rows
    documents = random_documents([14, 9, 8, 6], vocab_size=VOCAB)
    states = random_state(documents, "final", HIDDEN)
    make_store(tmp_path / "store", documents, {"final": states})
    context, head = small_context(tmp_path), small_head(small_spec())
    found = walk.expected_acceptance(head, context, Store.open(tmp_path / "store", ["final"]), [3, 0, 1], 2)
    independent = Mtp64(head.state_dict(), heads=4, kv_heads=2, head_dim=4, eps=EPS, theta=THETA)
    by_document = [rederived(independent, small_embed(), documents[i].tokens, states[i], documents[i].spans, 2) for i in (0, 1, 3)]
    rows = [[row for part in by_document for row in part[step]] for step in range(2)]
    assert found["rows"] == len(rows[0]) == 6 + 4 + 2
    for which, name in enumerate(("greedy_draft", "sampled_draft")):
        rates = means(rows, which)
        assert found[name]["accept_rate_by_step"] == pytest.approx(rates, rel=2e-5)
        assert found[name]["expected_accepted_length"] == pytest.approx(1 + rates[0] + rates[0] * rates[1], rel=2e-5)


@pytest.mark.parametrize(("tokens", "rows"), [([1, 2, 3, 4], 1), ([1, 2, 3], 0)])
def test_a_step_without_rows_has_no_rate(tmp_path: Path, tokens: list[int], rows: int) -> None:
    documents = [Document(id="a", source="s", split=HELD_OUT, tokens=tokens, spans=[(2, len(tokens))])]
    make_store(tmp_path / "store", documents, {"final": random_state(documents, "final", HIDDEN)})
    found = walk.expected_acceptance(small_head(small_spec()), small_context(tmp_path), Store.open(tmp_path / "store", ["final"]), [0], 2)
    assert found["rows"] == rows
    for name in ("greedy_draft", "sampled_draft"):
        assert [rate is None for rate in found[name]["accept_rate_by_step"]] == [not rows, True]
        assert found[name]["expected_accepted_length"] is None
