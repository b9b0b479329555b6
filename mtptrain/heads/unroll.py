"""The draft steps of a head, shared by training, the offline walk and the reference decoder.

Legend: R rows that draft, S step-0 rows, H hidden, D documents.

Step 0 of every row of a document gives the keys that later rows see; steps k >= 1 of a row are seen by that row alone
(an engine rewrites the draft's KV from true target states after each verification). Only rows that draft have queries.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtptrain.heads.alignment import Alignment
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.layers import attend


class Unroll:
    """One pass of drafting over packed documents.

    `extend` adds step-0 rows, `start` chooses rows that draft and returns their states after step 0, `advance` keeps a
    subset of them and returns their states after the next step. A state returned is what goes to the output projection.
    """

    def __init__(self, drafter: Drafter, documents: int = 1, recompute: bool = False) -> None:
        """`recompute`: backward computes again what follows the attention, instead of keeping it."""
        self._drafter, self._head, self._recompute = drafter, drafter.head, recompute
        self._prefix: list[tuple[Tensor, Tensor] | None] = [None] * documents
        self._x_SH = self._z_SZ = torch.empty(0)

    def extend(self, token_S: Tensor, states: Mapping[str, Tensor], position_S: Tensor, document_S: Tensor) -> None:
        """Step-0 rows: the token after each row, the target's states at it (one [S, H] a capture), its position, its document (ascending).

        Rows of a document must come in order of position, starting at 0, over any number of calls.
        """
        self._x_SH, self._z_SZ = self._head.enter(self._drafter.embed(token_S), self._head.feature(states))
        k_SGD, v_SGD = self._head.layer.key_value(self._z_SZ, position_S)
        self._position_S, self._document_S = position_S, document_S
        counts = torch.bincount(document_S, minlength=len(self._prefix)).tolist()
        for document, (k, v) in enumerate(zip(k_SGD.split(counts), v_SGD.split(counts), strict=True)):
            old = self._prefix[document]
            if len(k) or old is None:
                self._prefix[document] = (k, v) if old is None else (torch.cat((old[0], k)), torch.cat((old[1], v)))

    def look_back(self, prefix: tuple[Tensor, Tensor], token_S: Tensor, states: Mapping[str, Tensor], position_S: Tensor) -> None:
        """Step-0 rows of one document, as in `extend`, whose keys and values are among `prefix`'s, [T, G, D] from position 0 on."""
        self._x_SH, self._z_SZ = self._head.enter(self._drafter.embed(token_S), self._head.feature(states))
        self._position_S, self._document_S = position_S, torch.zeros_like(position_S)
        self._prefix = [prefix]

    def start(self, row_R: Tensor) -> Tensor:
        """States [R, H] after step 0 of rows `row_R` (ascending indices into the latest `extend` or `look_back`)."""
        self._row_position_R = self._position_S[row_R]
        self._row_document_R = self._document_S[row_R]
        self._own: list[tuple[Tensor, Tensor]] = []
        self._step = 0
        return self._layer(self._x_SH[row_R], self._z_SZ[row_R])

    def advance(self, keep_A: Tensor, token_A: Tensor) -> Tensor:
        """States [A, H] after the next step of rows `keep_A` (ascending indices into the last step's rows).

        `token_A`: the token each of them embeds (the true one in training, the drafted one in decoding).
        """
        self._step += 1
        self._row_position_R = self._row_position_R[keep_A]
        self._row_document_R = self._row_document_R[keep_A]
        self._own = [(k[keep_A], v[keep_A]) for k, v in self._own]
        x_AH, z_AZ = self._head.enter(self._drafter.embed(token_A), self._recycled_RH[keep_A])
        self._own.append(self._head.layer.key_value(z_AZ, self._row_position_R + self._step))
        return self._layer(x_AH, z_AZ)

    def _layer(self, x_RH: Tensor, z_RZ: Tensor) -> Tensor:
        position_R = self._row_position_R + self._step
        q_RND = self._head.layer.query(z_RZ, position_R)
        counts = torch.bincount(self._row_document_R, minlength=len(self._prefix)).tolist()
        mixed, start = [], 0
        for document, count in enumerate(counts):
            if not count:
                continue
            rows = slice(start, start + count)
            prefix = self._prefix[document]
            assert prefix is not None
            own = [(k[rows], v[rows]) for k, v in self._own]
            last_key = self._row_position_R[rows]
            seen = int(last_key.max()) + 1
            visible = (prefix[0][:seen], prefix[1][:seen])
            mixed.append(attend(q_RND[rows], position_R[rows], visible, last_key, own, self._head.layer.config.sliding_window))
            start += count
        mixed_RND = torch.cat(mixed) if mixed else q_RND
        if self._recompute and torch.is_grad_enabled():
            out_RH = checkpoint(self._head.layer.finish, x_RH, mixed_RND, use_reentrant=False, preserve_rng_state=False)
        else:
            out_RH = self._head.layer.finish(x_RH, mixed_RND)
        state_RH, self._recycled_RH = self._head.leave(out_RH)
        return state_RH


def key_value(drafter: Drafter, token_S: Tensor, states: Mapping[str, Tensor], position_S: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [S, G, D] of step-0 rows, as `Unroll.look_back` wants them of all rows together."""
    head = drafter.head
    return head.layer.key_value(head.enter(drafter.embed(token_S), head.feature(states))[1], position_S)


def rows_of(states: Mapping[str, Tensor], row_R: Tensor | slice) -> dict[str, Tensor]:
    """The states of some rows, a capture each."""
    return {name: state[row_R] for name, state in states.items()}


def true_token_steps(
    unroll: Unroll, rows: Alignment, token_T: Tensor, states: Mapping[str, Tensor], steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each step over its valid rows, fed the true tokens: indices into `rows` [A], ascending, and the draft states [A, H].

    A row that is valid at a step was valid at the step before. `unroll` is new; `states`: the target's, [T, H] a capture.
    """
    unroll.extend(token_T[rows.input_RK[:, 0]], rows_of(states, rows.row_R), rows.position_R, rows.document_R)
    yield from unrolled_steps(unroll, rows, token_T, steps)


def unrolled_steps(unroll: Unroll, rows: Alignment, token_T: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same, where `unroll` has the step-0 rows already."""
    alive_A = rows.valid_RK[:, 0].nonzero().squeeze(-1)
    yield alive_A, unroll.start(alive_A)
    for step in range(1, steps):
        keep_A = rows.valid_RK[alive_A, step].nonzero().squeeze(-1)
        alive_A = alive_A[keep_A]
        yield alive_A, unroll.advance(keep_A, token_T[rows.input_RK[alive_A, step]])
