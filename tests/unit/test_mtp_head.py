"""The MTP head and its unrolled steps against the float64 re-derivation."""

from typing import Any

import pytest
import torch

from mtptrain.config import NormsConfig
from mtptrain.errors import UserError
from mtptrain.heads.build import init_from_last_layer
from mtptrain.heads.drafter import as_served
from mtptrain.heads.unroll import Unroll, rows_of
from tests.unit.heads import EPS, HIDDEN, THETA, bound, small_batch, small_embed, small_head, small_spec
from tests.unit.rederive import Mtp64

VARIANTS: dict[str, dict[str, Any]] = {
    "all norms": {},
    "no embed norm": {"norms": NormsConfig(embed=False)},
    "no hidden norm": {"norms": NormsConfig(hidden=False)},
    "no input norm": {"norms": NormsConfig(input=False)},
    "no post-attention norm": {"norms": NormsConfig(post_attention=False)},
    "no output norm": {"norms": NormsConfig(output=False)},
    "biases and q/k norms": {"attention_bias": True, "qk_norm": True},
}


def rederived(head: torch.nn.Module) -> Mtp64:
    return Mtp64(dict(head.named_parameters()), heads=4, kv_heads=2, head_dim=4, eps=EPS, theta=THETA)


@pytest.mark.parametrize("variant", VARIANTS)
def test_unrolled_steps_equal_the_rederivation(variant: str) -> None:
    """Two packed documents, three steps, every valid row: float64 from the formulas, within float32 rounding."""
    head = small_head(small_spec(), **VARIANTS[variant])
    embed, lengths, steps = small_embed(), [9, 6], 3
    batch = small_batch(lengths, [[(3, 8)], [(2, 6)]], steps)
    rows = batch.rows
    unroll = Unroll(bound(head, embed), documents=2)
    unroll.extend(batch.token_T[rows.input_RK[:, 0]], rows_of(batch.states, rows.row_R), rows.position_R, rows.document_R)
    alive = rows.valid_RK[:, 0].nonzero().squeeze(-1)
    states = [(alive, unroll.start(alive))]
    for k in range(1, steps):
        keep = rows.valid_RK[alive, k].nonzero().squeeze(-1)
        alive = alive[keep]
        states.append((alive, unroll.advance(keep, batch.token_T[rows.input_RK[alive, k]])))
    independent, compared = rederived(head), 0
    for k, (alive, state) in enumerate(states):
        for row, y in zip(alive.tolist(), state, strict=True):
            first, length = (0, 9) if row < 8 else (9, 6)
            tokens, finals = batch.token_T[first : first + length].tolist(), batch.final_TH[first : first + length]
            expected = independent.draft_states(embed, tokens, finals, int(rows.position_R[row]), k + 1)[k]
            torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5)
            compared += 1
    assert compared == (4 + 3) + (3 + 2) + (2 + 1)


def test_fault_04_rope_position_advances_with_the_step() -> None:
    """Step k sits at position p+k. Keeping position p (what some trainers do) gives another state."""
    head, embed, batch = small_head(small_spec()), small_embed(), small_batch([8], [[(2, 8)]], 2)
    tokens = batch.token_T.tolist()
    unroll = Unroll(bound(head, embed))
    unroll.extend(batch.token_T[1:], {"final": batch.final_TH[:-1]}, torch.arange(7), torch.zeros(7, dtype=torch.int64))
    unroll.start(torch.tensor([3]))
    ours = unroll.advance(torch.tensor([0]), batch.token_T[5:6])[0].double()
    independent = rederived(head)
    right = independent.draft_states(embed, tokens, batch.final_TH, 3, 2)[1]
    torch.testing.assert_close(ours, right, rtol=2e-5, atol=2e-5)
    entered = [independent.enter(embed[tokens[r + 1]].double(), batch.final_TH[r].double()) for r in range(4)]
    y0 = independent.draft_states(embed, tokens, batch.final_TH, 3, 1)[0]
    x1, z1 = independent.enter(embed[tokens[5]].double(), y0)
    keys = [independent.key(z, r) for r, (_, z) in enumerate(entered)] + [independent.key(z1, 3)]
    values = [independent.value(z) for z in [*(z for _, z in entered), z1]]
    stuck, _ = independent.leave(independent.layer(x1, z1, 3, keys, values))
    assert float((ours - stuck).abs().max()) > 1e-3


def test_growing_prefix_equals_one_extend() -> None:
    """The reference decoder extends row by row; the keys are the same."""
    head, embed, batch = small_head(small_spec()), small_embed(), small_batch([8], [[(2, 8)]], 1)
    document = torch.zeros(7, dtype=torch.int64)
    whole = Unroll(bound(head, embed))
    whole.extend(batch.token_T[1:], {"final": batch.final_TH[:-1]}, torch.arange(7), document)
    grown = Unroll(bound(head, embed))
    for rows in (slice(0, 4), slice(4, 6), slice(6, 7)):
        grown.extend(batch.token_T[1:][rows], {"final": batch.final_TH[:-1][rows]}, torch.arange(7)[rows], document[rows])
    torch.testing.assert_close(grown.start(torch.tensor([0])), whole.start(torch.tensor([6])), rtol=1e-6, atol=1e-6)


def test_sliding_window_hides_old_keys() -> None:
    """With window w, row p sees the keys of positions p-w+1..p: states before them don't matter, the first inside does."""
    head, embed, batch = small_head(small_spec(), sliding_window=3), small_embed(), small_batch([8], [[(2, 8)]], 1)

    def last_state(changed: int) -> torch.Tensor:
        finals = batch.final_TH.clone()
        finals[changed] += 1.0
        unroll = Unroll(bound(head, embed))
        unroll.extend(batch.token_T[1:], {"final": finals[:-1]}, torch.arange(7), torch.zeros(7, dtype=torch.int64))
        return unroll.start(torch.tensor([6]))

    base = last_state(7)
    assert torch.equal(last_state(3), base)
    assert not torch.equal(last_state(4), base)


def test_embeddings_are_scaled_as_the_target_scales_them() -> None:
    head, embed, batch = small_head(small_spec(), norms=NormsConfig(embed=False)), small_embed(), small_batch([4], [[(1, 4)]], 1)
    rows, document = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    scaled = Unroll(bound(head, embed, scale=2.0))
    scaled.extend(batch.token_T[1:], {"final": batch.final_TH[:-1]}, rows, document)
    doubled = Unroll(bound(head, embed * 2))
    doubled.extend(batch.token_T[1:], {"final": batch.final_TH[:-1]}, rows, document)
    assert torch.equal(scaled.start(rows[2:]), doubled.start(rows[2:]))


def last_layer(offset: float = 0.0) -> dict[str, torch.Tensor]:
    head = small_head(small_spec(), seed=5)
    return {n: p.detach() - (offset if "norm" in n else 0.0) for n, p in head.layer.named_parameters()}


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_last_layer_initialisation_converts_the_norm_form(offset: float) -> None:
    spec = small_spec(rms_norm_offset=offset)
    head, source = small_head(spec, seed=1), small_head(small_spec(), seed=5)
    init_from_last_layer(head, spec, last_layer(offset), torch.full((HIDDEN,), 0.5))
    for name, parameter in source.layer.named_parameters():
        torch.testing.assert_close(dict(head.layer.named_parameters())[name], parameter)
    assert torch.equal(head.norm.weight, torch.full((HIDDEN,), 0.5 + offset))


def test_last_layer_initialisation_refuses_another_form() -> None:
    head = small_head(small_spec())
    with pytest.raises(UserError, match="activation is gelu"):
        init_from_last_layer(head, small_spec(hidden_act="gelu"), last_layer(), torch.ones(HIDDEN))
    with pytest.raises(UserError, match=r"has self_attn\.q_norm\.weight, which the head has not"):
        init_from_last_layer(head, small_spec(), last_layer() | {"self_attn.q_norm.weight": torch.ones(4)}, torch.ones(HIDDEN))


def test_a_head_in_an_engines_dtype_keeps_its_rope_frequencies() -> None:
    """Rounded to bfloat16 they would turn position 1000 by whole radians elsewhere."""
    head = small_head(small_spec())
    served = as_served(head, torch.bfloat16)
    assert {p.dtype for p in served.parameters()} == {torch.bfloat16}
    position = torch.tensor([1000])
    for exact, ours in zip(head.layer.rope(position), served.layer.rope(position), strict=True):
        assert torch.equal(exact, ours)
    assert {p.dtype for p in head.parameters()} == {torch.float32}
