"""First weights by least squares: the fusing projection as the best linear guess of the target's next state.

    minimise over W:  mean over rows of |W u_p - y_p|^2 + ridge * |W|^2

u_p is what the projection reads ([embedding; state], normed as the head norms them), y_p the target's state at p + 1: before the weights
of its final norm where the head has an output norm, which then starts with those weights, and as it is where it has none. What attention
and MLP add starts at zero, so the first head is this guess, and training only improves on it.

Legend: R rows, H hidden, F what the fusing projection reads.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.errors import UserError
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.layers import RmsNorm

_RIDGE = 1e-3
"""Times the mean square of what the projection reads."""
_ROWS_PER_INPUT = 200
"""More rows than this times F tell a linear map nothing new."""


def init_least_squares(drafter: Drafter, batches: Iterable[Batch], final_norm_H: Tensor) -> int:
    """Set the head's fusing projection, output norm, and the outputs of attention and MLP. Returns the number of rows it took.

    `batches` are aligned for one step at least; `final_norm_H`: the factors of the target's final norm (1 + w where it has that form).
    UserError without rows.
    """
    head = drafter.head
    assert head.fusion is not None, "lookup.py is for heads that fuse no embedding with a state"
    normed = isinstance(getattr(head, "norm", None), RmsNorm)
    factor_H = final_norm_H.float() if normed else torch.ones_like(final_norm_H, dtype=torch.float32)
    inverse_H = torch.where(factor_H.abs() > 1e-3 * factor_H.abs().max(), 1.0 / factor_H, torch.zeros_like(factor_H))
    width, rows = head.fusion.in_features, 0
    gram_FF = torch.zeros(width, width, device=factor_H.device)
    moment_FH = torch.zeros(width, len(factor_H), device=factor_H.device)
    with torch.no_grad():
        for batch in batches:
            fused_RF, next_RH = _pairs(drafter, batch)
            gram_FF += fused_RF.T @ fused_RF
            moment_FH += fused_RF.T @ (next_RH * inverse_H)
            rows += len(fused_RF)
            if rows >= _ROWS_PER_INPUT * width:
                break
        if not rows:
            raise UserError("head.init=least_squares: no row to fit; prepare more data")
        gram_FF.diagonal().add_(_RIDGE * gram_FF.diagonal().mean())
        head.fusion.weight.copy_(torch.linalg.solve(gram_FF.double(), moment_FH.double()).T)
        if normed:
            head.norm.weight.copy_(factor_H)  # type: ignore[operator, union-attr]
        head.layer.self_attn.o_proj.weight.zero_()
        head.layer.mlp.down_proj.weight.zero_()
    return rows


def _pairs(drafter: Drafter, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the projection reads, float32 [R, F], and the target's next state [R, H], of the rows that draft."""
    rows = batch.rows
    valid_A = rows.valid_RK[:, 0]
    embed_RH = drafter.embed(batch.token_T[rows.input_RK[valid_A, 0]])
    hidden_RH = drafter.head.feature({name: state[rows.row_R[valid_A]] for name, state in batch.states.items()})
    return drafter.head.fused(embed_RH, hidden_RH).float(), batch.final_TH[rows.teacher_RK[valid_A, 0]].float()
