"""The offline walk against a sequential one that follows its definition with the float64 head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtptrain.batches import Batch
from mtptrain.config import HeadKind, OutputProjection
from mtptrain.decoding.walk import draft_all_rows, hop
from mtptrain.report.measurement import measure
from tests.unit.heads import EPS, THETA, bound, small_batch, small_embed, small_head, small_spec
from tests.unit.rederive import Layer64, Mtp64


def sequential(
    head: Layer64,
    embed: torch.Tensor,
    tokens: list[int],
    finals: torch.Tensor,
    span: tuple[int, int],
    k: int,
    choice: Callable[[torch.Tensor], int] | None = None,
) -> list[tuple[int, list[int], int]]:
    """`choice`: the token a state drafts, by default its best logit with `embed` as the output projection.

    p = s-1; while p+2 <= e: draft K tokens from row p, count matches to the first miss, p += n+1 (e inclusive)."""
    drafts, p, e = [], span[0] - 1, span[1] - 1
    while p + 2 <= e:
        drafted: list[int] = []
        for step in range(k):
            state = head.draft_states(embed, tokens, finals, p, step + 1, drafted)[step]
            drafted.append(choice(state) if choice else int((embed.double() @ state).argmax()))
        offered = min(k, e - (p + 2) + 1)
        n = next((i for i in range(offered) if drafted[i] != tokens[p + 2 + i]), offered)
        drafts.append((p, drafted[: min(n + 1, offered)], n))
        p += n + 1
    return drafts


def agreeable_batch(head: Mtp64, embed: torch.Tensor, lengths: list[int], spans: list[list[tuple[int, int]]], k: int) -> Batch:
    """Documents whose continuation often is what the head drafts, so that long acceptances happen."""
    batch = small_batch(lengths, spans, k)
    generator = torch.Generator().manual_seed(3)
    offset = 0
    for length, ranges in zip(lengths, spans, strict=True):
        tokens = batch.token_T[offset : offset + length]
        for start, end in ranges:
            for t in range(start + 1, end):
                if float(torch.rand((), generator=generator)) < 0.75:
                    p = t - 2
                    state = head.draft_states(embed, tokens.tolist(), batch.final_TH[offset : offset + length], p, 1)[0]
                    tokens[t] = int((embed.double() @ state).argmax())
        offset += length
    return batch


def test_walk_equals_the_sequential_definition() -> None:
    embed, spec = small_embed(), small_spec()
    head = small_head(spec)
    independent = Mtp64(dict(head.named_parameters()), heads=4, kv_heads=2, head_dim=4, eps=EPS, theta=THETA)
    lengths, spans = [20, 14], [[(3, 12), (14, 20)], [(2, 14)]]
    batch = agreeable_batch(independent, embed, lengths, spans, 4)
    rows = draft_all_rows(bound(head, embed), batch, 4)
    for k in (1, 2, 4):
        walks = hop(rows, batch, spans, [("a", "x"), ("b", "y")], k)
        for walk, (first, length), ranges in zip(walks, [(0, 20), (20, 14)], spans, strict=True):
            tokens, finals = batch.token_T[first : first + length].tolist(), batch.final_TH[first : first + length]
            expected = [d for span in ranges for d in sequential(independent, embed, tokens, finals, span, k)]
            assert [(d.row, d.tokens, d.accepted) for d in walk.drafts] == expected
            assert walk.generated == sum(e - s for s, e in ranges)
    hits = draft_all_rows(bound(head, embed), batch, 4, hits_only=True)
    assert hits.accepted_R == rows.accepted_R
    assert [t[: n + 1] for t, n in zip(hits.tokens_R, hits.accepted_R, strict=True)] == [
        [*t[:n], *([-1] if len(t) > n else [])] for t, n in zip(rows.tokens_R, rows.accepted_R, strict=True)
    ]
    assert max(rows.accepted_R) >= 2  # the case holds long acceptances, else it would prove little


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("options", [{}, {"kind": HeadKind.eagle3, "lm_head": OutputProjection.target}, {"sliding_window": 6}], ids=str)
def test_a_long_document_is_walked_in_windows_to_the_same_drafts(
    options: dict[str, Any], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(num_layers=8)
    head = small_head(spec, **options)
    spans = [[(3, 12), (14, 40)]]
    batch = small_batch([40], spans, 4, captures=("final", *head.captures))
    drafter = bound(head)
    for step in range(4):  # some rows accept several
        whole = draft_all_rows(drafter, batch, 4)
        for row, tokens, accepted in zip(whole.row_R.tolist(), whole.tokens_R, whole.accepted_R, strict=True):
            if row % 3 == 0 and accepted == step and len(tokens) > step:
                batch.token_T[row + 2 + step] = tokens[step]
    whole = draft_all_rows(drafter, batch, 4)
    assert sum(whole.accepted_R) > 0
    monkeypatch.setattr("mtptrain.decoding.walk._WINDOW", window)
    parts = draft_all_rows(drafter, batch, 4)
    assert torch.equal(parts.row_R, whole.row_R)
    assert (parts.tokens_R, parts.accepted_R) == (whole.tokens_R, whole.accepted_R)
    assert hop(parts, batch, spans, [("a", "x")], 3) == hop(whole, batch, spans, [("a", "x")], 3)


def test_fault_08_rates_are_those_of_the_walk_not_products_of_marginals() -> None:
    """Hand-made drafts: unconditional rates over drafts, conditional ones over drafts that came to compare the position."""
    from mtptrain.decoding.walk import DocumentWalk, Draft

    drafts = [Draft(0, [1, 2, 3], 3), Draft(4, [1], 0), Draft(5, [1, 9], 1), Draft(7, [4], 1)]
    found = measure([DocumentWalk("a", "s", spans=1, generated=10, drafts=drafts)], 3)["overall"]
    assert found["mean_accepted_length"] == 1 + 5 / 4
    assert found["accept_rate_per_position"] == [3 / 4, 1 / 4, 1 / 4]
    assert found["conditional_accept_rate"] == [3 / 4, 1 / 2, 1.0]
    assert found["tokens_per_target_step"] == 9 / 4
    assert found["mean_accepted_length_ci95"] is None


def test_interval_holds_the_mean_and_shrinks_with_documents() -> None:
    from mtptrain.decoding.walk import DocumentWalk, Draft

    def walk(i: int) -> DocumentWalk:
        return DocumentWalk(str(i), "s", 1, 9, [Draft(0, [1], i % 2), Draft(1, [1], 1), Draft(2, [1], 0)])

    def width(count: int) -> float:
        found = measure([walk(i) for i in range(count)], 1)["overall"]
        low, high = found["mean_accepted_length_ci95"]
        assert low <= found["mean_accepted_length"] <= high
        return high - low

    # accepted per draft of a document is 1/3 or 2/3: its mean has standard error (1/6) / sqrt(n), the interval is 3.92 of them
    for count in (20, 200):
        assert abs(width(count) / (3.92 / 6 / count**0.5) - 1) < 0.25
