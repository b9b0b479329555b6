"""First weights of an EAGLE-3 head: attention that looks up what followed a token before, and the rest by least squares.

The layer of an eagle3 head reads z_p = [e(t_{p+1}); n_p], the token it got and its normed state. Text repeats itself, so a good guess of
t_{p+2} is what came after the last t_{p+1}: the row j with t_j = t_{p+1} has read t_{j+1}. A head that starts at random does not find
this for a long time, so it is built in:

    g    = W_y s + eps U W_c s            s: the normed streams; W_y: the target's own state, from s; W_c: a code of the row's own token,
                                          written along U, the directions in which the target's states vary least
    lookup groups   q = beta C e(t_{p+1}), k = M z_j ~ C e(t_j)         in the channels that RoPE turns slowly
                    and a bonus for the row itself in those it turns fast, which it looks at when nothing matches
                    v = R e(t_{j+1})                                    R: what of a token says most about the state that predicts it
    other groups    the row itself, v = S e(t_{p+1})                    S: what of it says most about the state that is wanted
    o_proj          least squares: attention's outputs to the target's next state
    MLP             random, and adds nothing at first

C e is of the token's embedding what the streams tell best of the token they belong to (canonical correlations), of about the same variance
in each direction and turned at random, so that different tokens have nearly orthogonal codes; R and S are reduced-rank regressions.
This is the n-gram lookup of serving engines, and an induction head (arXiv 2209.11895) made by hand; training sharpens it.

Legend: R rows, H hidden, F what fc reads, Z what q, k, v read, C code, V carried by values, J directions that vary, D head size.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.errors import UserError
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.unroll import Unroll, true_token_steps

_RIDGE = 1e-3
"""Times each input's own mean square: un-normed streams have channels a thousand times larger than others."""
_FLOOR = 1e-9
"""Times the mean of all: for an input that is always zero."""
_ROWS_PER_INPUT = 30
"""More rows than this times F tell fc nothing new."""
_CODE_SCALE = 0.1
"""eps: large enough to be read back, small enough not to disturb the state."""
_LARGEST_CORRELATION = 0.98
"""A direction that is told better weighs no more than this one, 25."""
_SHARPNESS = 10.0
"""beta: the score of a match; that of another token is around zero."""
_SELF_BONUS = 2.0
_SELF_SCORE = 40.0
"""Of a group that is to see its own row alone."""
_SELF_PAIRS = 8
"""Fastest pairs of channels, which tell a row from its neighbour."""
_SPAN = 400
"""Tokens over which a content channel may turn by half a radian at most."""
_LOOKUP_SHARE = 4 / 9
"""Of the key/value groups; the others carry the row's own token."""

Batches = Callable[[], Iterable[Batch]]


class Moments:
    """Sums for a least-squares map of [R, X] to [R, Y]."""

    def __init__(self) -> None:
        self.rows = 0
        self.gram_XX = self.cross_XY = self.sum_X = self.sum_Y = torch.zeros(())

    def add(self, x_RX: Tensor, y_RY: Tensor) -> None:
        x_RX, y_RY = x_RX.float(), y_RY.float()
        self.rows += len(x_RX)
        self.gram_XX = self.gram_XX + x_RX.T @ x_RX
        self.cross_XY = self.cross_XY + x_RX.T @ y_RY
        self.sum_X, self.sum_Y = self.sum_X + x_RX.sum(0), self.sum_Y + y_RY.sum(0)

    def solve(self, cross_XY: Tensor | None = None) -> Tensor:
        """[X, Y], of `cross_XY` where it is given."""
        gram_XX = self.gram_XX.double()
        size_X = gram_XX.diagonal().clone()
        gram_XX.diagonal().add_(_RIDGE * size_X + _FLOOR * size_X.mean())
        return torch.linalg.solve(gram_XX, (self.cross_XY if cross_XY is None else cross_XY).double()).float()


def init_lookup(drafter: Drafter, batches: Batches, final_norm_H: Tensor, seed: int) -> int:
    """Set fc, attention and output norm of an eagle3 head; its MLP adds nothing. Returns the number of rows it took.

    `batches()` gives the same batches each time, aligned for one step at least; `final_norm_H`: the factors of the
    target's final norm. UserError without a row.
    """
    head = drafter.head
    assert isinstance(head, Eagle3Head)
    random = torch.Generator().manual_seed(seed)
    factor_H = final_norm_H.float()
    inverse_H = torch.where(factor_H.abs() > 1e-3 * factor_H.abs().max(), 1.0 / factor_H, torch.zeros_like(factor_H))
    with torch.no_grad():
        head.norm.weight.copy_(factor_H)
        head.layer.self_attn.o_proj.weight.zero_()
        head.layer.mlp.down_proj.weight.zero_()
        enough = _enough(batches, head.fc.in_features)
        code = _init_fc(drafter, enough, inverse_H, random)
        _init_attention(drafter, enough, code)
        head.layer.self_attn.o_proj.weight.copy_(_what_attention_adds(drafter, enough, inverse_H).T)
    return code.rows


def _enough(batches: Batches, inputs: int) -> Batches:
    """The first of the batches, as many as are of use."""
    count = rows = 0
    for batch in batches():
        count, rows = count + 1, rows + len(batch.token_T)
        if rows >= _ROWS_PER_INPUT * inputs:
            break
    return lambda: itertools.islice(batches(), count)


@dataclass(slots=True)
class _Code:
    """A token's code, (e - mean) @ basis, of unit variance."""

    rows: int
    """It was made from."""
    mean_H: Tensor
    basis_HC: Tensor
    followed_HV: Tensor
    """What the lookups' values carry of the token that followed."""
    given_HV: Tensor
    """What the other groups' values carry of the row's own token."""

    def of(self, embed_RH: Tensor) -> Tensor:
        return (embed_RH - self.mean_H) @ self.basis_HC


def _channels(head: Eagle3Head) -> tuple[Tensor, Tensor, Tensor]:
    """int64, of one attention head: those that hardly turn within a text, the others' first halves, and of these the fastest."""
    frequency = head.layer.rope.embedding.inv_freq.float()
    fastest_first = frequency.argsort(descending=True, stable=True)
    pairs = len(frequency)
    slow = max(int((frequency * _SPAN < 0.5).sum()), pairs // 4, 1)
    content = fastest_first[pairs - slow :].sort().values
    still = torch.arange(2 * pairs, head.layer.config.head_dim, device=frequency.device)
    return torch.cat((content, content + pairs, still)), fastest_first[: pairs - slow].sort().values, fastest_first[:_SELF_PAIRS]


def _lookups(head: Eagle3Head) -> int:
    """Key/value groups that look up."""
    return max(1, round(head.layer.config.num_kv_heads * _LOOKUP_SHARE))


def _init_fc(drafter: Drafter, batches: Batches, inverse_H: Tensor, random: torch.Generator) -> _Code:
    """fc, and the code of tokens it writes beside the target's state."""
    head = drafter.head
    assert isinstance(head, Eagle3Head)
    own, embeds, states, label, given = Moments(), Moments(), Moments(), Moments(), Moments()
    cross_FH = torch.zeros(())
    for batch in batches():
        embed_TH = head.embed_norm(drafter.embed(batch.token_T)).float()
        streams_TF, state_TH = head.streams(batch.states).float(), batch.final_TH.float() * inverse_H
        own.add(streams_TF, state_TH)
        embeds.add(embed_TH, embed_TH[:, :0])
        states.add(state_TH, state_TH[:, :0])
        cross_FH = cross_FH + streams_TF.T @ embed_TH
        rows, valid_R = batch.rows, batch.rows.valid_RK[:, 0]
        next_AH = state_TH[rows.teacher_RK[valid_R, 0]]
        label.add(embed_TH[rows.label_RK[valid_R, 0]], next_AH)
        given.add(embed_TH[rows.input_RK[valid_R, 0]], next_AH)
    if not own.rows:
        raise UserError("head.init=least_squares: no row to fit; prepare more data")
    mean_H = embeds.sum_X / embeds.rows
    covariance_HH = embeds.gram_XX / embeds.rows - torch.outer(mean_H, mean_H)
    cross_FH = cross_FH - torch.outer(own.sum_X, mean_H)
    fitted_FH = own.solve(cross_FH)
    content, _, _ = _channels(head)
    lookups, shape = _lookups(head), head.layer.config
    basis_HC = _readable(covariance_HH, fitted_FH.T @ cross_FH / own.rows, lookups * len(content))
    telling = [_telling(pairs, groups * shape.head_dim) for pairs, groups in ((label, lookups), (given, shape.num_kv_heads - lookups))]
    code = _Code(own.rows, mean_H, *(_turned(directions, random) for directions in (basis_HC, *telling)))
    size = basis_HC.shape[1]
    least_HC = torch.linalg.eigh(states.gram_XX.double())[1][:, :size].float()
    state_FH, code_FC = own.solve(), fitted_FH @ code.basis_HC
    head.fc.weight.copy_((state_FH - state_FH @ least_HC @ least_HC.T + _CODE_SCALE * code_FC @ least_HC.T).T)
    return code


def _readable(covariance_HH: Tensor, explained_HH: Tensor, most: int) -> Tensor:
    """[H, C]: the `most` directions of the embeddings that the streams tell best (canonical correlations), of weighted unit variance.

    A direction of correlation r counts r / (1 - r^2): so much does the log-odds of "the same token" change with the product of the two
    values, the one that is known and the one that was read, if both are Gaussian.
    """
    white_HJ = _whitening(covariance_HH.double())
    squared_J, turn_JJ = torch.linalg.eigh(white_HJ.T @ explained_HH.double() @ white_HJ)
    squared_C = squared_J[-most:].clamp(1e-9, _LARGEST_CORRELATION**2)
    weight_C = squared_C.sqrt() / (1 - squared_C)
    return (white_HJ @ turn_JJ[:, -most:] * (weight_C / weight_C.mean()).sqrt()).float()


def _telling(pairs: Moments, most: int) -> Tensor:
    """[H, V]: the `most` directions of the embeddings that say most about the state beside them (reduced-rank regression)."""
    mean_H, mean_Y = pairs.sum_X / pairs.rows, pairs.sum_Y / pairs.rows
    covariance_HH = (pairs.gram_XX / pairs.rows - torch.outer(mean_H, mean_H)).double()
    cross_HY = (pairs.cross_XY / pairs.rows - torch.outer(mean_H, mean_Y)).double()
    white_HJ = _whitening(covariance_HH)
    turn_JV, size_V, _ = torch.linalg.svd(white_HJ.T @ cross_HY, full_matrices=False)
    size_V = size_V[:most].clamp_min(1e-30)
    return (white_HJ @ turn_JV[:, :most] * (size_V / size_V.mean()).sqrt()).float()


def _whitening(covariance_HH: Tensor) -> Tensor:
    """[H, J]: x @ it has unit variance in each of J directions, those that vary at all."""
    values_H, vectors_HH = torch.linalg.eigh(covariance_HH)
    kept_H = values_H > 1e-6 * values_H[-1]
    return vectors_HH[:, kept_H] / values_H[kept_H].sqrt()


def _turned(directions_HC: Tensor, random: torch.Generator) -> Tensor:
    """The same directions mixed at random, so that each part of them says as much as another."""
    count = directions_HC.shape[1]
    return directions_HC @ torch.linalg.qr(torch.randn(count, count, generator=random))[0].to(directions_HC.device)


def _init_attention(drafter: Drafter, batches: Batches, code: _Code) -> None:
    """q, k and v."""
    head = drafter.head
    assert isinstance(head, Eagle3Head)
    shape, attention = head.layer.config, head.layer.self_attn
    keys = Moments()
    for batch in batches():
        rows = batch.rows
        token_S = batch.token_T[rows.input_RK[:, 0]]
        _, z_SZ = head.enter(drafter.embed(token_S), head.feature({name: state[rows.row_R] for name, state in batch.states.items()}))
        keys.add(z_SZ, code.of(head.embed_norm(drafter.embed(batch.token_T[rows.row_R])).float()))
    key_CZ = keys.solve().T
    one_Z = keys.solve(keys.sum_X[:, None]).squeeze(1)
    hidden, size = len(code.mean_H), code.basis_HC.shape[1]
    query_CZ = -torch.outer(code.mean_H @ code.basis_HC, one_Z)
    query_CZ[:, :hidden] += code.basis_HC.T
    content, fast, fastest = _channels(head)
    queries, lookups = shape.num_heads // shape.num_kv_heads, _lookups(head)
    q_NDZ, k_GDZ, v_GDZ = (
        torch.zeros(heads, shape.head_dim, key_CZ.shape[1], device=key_CZ.device)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    scale = math.sqrt(shape.head_dim)  # attention divides by it
    for group in range(shape.num_kv_heads):
        mine = slice(group * queries, (group + 1) * queries)
        if group < lookups:
            first, values_HV = group, code.followed_HV
            code_P = (torch.arange(len(content)) + group * len(content)) % size
            q_NDZ[mine, content] = query_CZ[code_P] * (_SHARPNESS * scale / math.sqrt(len(content)))
            k_GDZ[group, content] = key_CZ[code_P] / math.sqrt(len(content))
            q_NDZ[mine, fast] = one_Z * (_SELF_BONUS * scale / max(1, len(fast)))
            k_GDZ[group, fast] = one_Z
        else:
            first, values_HV = group - lookups, code.given_HV
            q_NDZ[mine, fastest] = one_Z * (_SELF_SCORE * scale / len(fastest))
            k_GDZ[group, fastest] = one_Z
        carried = (torch.arange(shape.head_dim) + first * shape.head_dim) % values_HV.shape[1]
        v_GDZ[group, :, :hidden] = values_HV[:, carried].T
    for projection, weight in ((attention.q_proj, q_NDZ), (attention.k_proj, k_GDZ), (attention.v_proj, v_GDZ)):
        projection.weight.copy_(weight.flatten(0, 1))


def _what_attention_adds(drafter: Drafter, batches: Batches, inverse_H: Tensor) -> Tensor:
    """[ND, H]: the least-squares map of the heads' outputs to what the residual (without them) lacks of the next state."""
    layer, found = drafter.head.layer, Moments()
    read: list[Tensor] = []
    residual: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: read.append(given[0])),
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, given: residual.append(given[0])),
    ]
    try:
        for batch in batches():
            row_A, _ = next(true_token_steps(Unroll(drafter, len(batch.documents)), batch.rows, batch.token_T, batch.states, 1))
            next_AH = batch.final_TH[batch.rows.teacher_RK[row_A, 0]].float() * inverse_H
            found.add(read.pop(), next_AH - residual.pop())
    finally:
        for hook in hooks:
            hook.remove()
    return found.solve()
