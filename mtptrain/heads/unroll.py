"""The draft steps of a head, shared by training, the offline walk and the reference decoder.

Legend: R rows that draft, S step-0 rows, H hidden, D documents.

Step 0 of every row of a document gives the keys that later rows see; steps k >= 1 of a row are seen by that row alone
(an engine rewrites the draft's KV from true target states after each verification). Only rows that draft have queries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mtptrain.heads.alignment import Alignment
from mtptrain.heads.layers import attend
from mtptrain.heads.mtp import MtpHead


class Unroll:
    """One pass of drafting over packed documents.

    `extend` adds step-0 rows, `start` chooses rows that draft and returns their states after step 0, `advance` keeps a
    subset of them and returns their states after the next step.
    """

    def __init__(self, head: MtpHead, embed_VH: Tensor, embed_scale: float, documents: int = 1) -> None:
        self._head = head
        self._embed_VH = embed_VH
        self._embed_scale = embed_scale
        self._prefix: list[tuple[Tensor, Tensor] | None] = [None] * documents
        self._x_SH = torch.empty(0)

    def _embed(self, token_R: Tensor) -> Tensor:
        embed_RH = self._embed_VH[token_R]
        return embed_RH * self._embed_scale if self._embed_scale != 1.0 else embed_RH

    def extend(self, token_S: Tensor, state_SH: Tensor, position_S: Tensor, document_S: Tensor) -> None:
        """Step-0 rows: the token after each row, the target's state at it, its position, its document (ascending).

        Rows of a document must come in order of position, starting at 0, over any number of calls.
        """
        self._x_SH = self._head.fuse(self._embed(token_S), state_SH)
        k_SGD, v_SGD = self._head.layer.key_value(self._x_SH, position_S)
        self._position_S, self._document_S = position_S, document_S
        counts = torch.bincount(document_S, minlength=len(self._prefix)).tolist()
        for document, (k, v) in enumerate(zip(k_SGD.split(counts), v_SGD.split(counts), strict=True)):
            old = self._prefix[document]
            if len(k) or old is None:
                self._prefix[document] = (k, v) if old is None else (torch.cat((old[0], k)), torch.cat((old[1], v)))

    def start(self, row_R: Tensor) -> Tensor:
        """States [R, H] after step 0 of rows `row_R` (ascending indices into the latest `extend`)."""
        self._row_position_R = self._position_S[row_R]
        self._row_document_R = self._document_S[row_R]
        self._own: list[tuple[Tensor, Tensor]] = []
        self._step = 0
        return self._layer(self._x_SH[row_R])

    def advance(self, keep_A: Tensor, token_A: Tensor) -> Tensor:
        """States [A, H] after the next step of rows `keep_A` (ascending indices into the last step's rows).

        `token_A`: the token each of them embeds (the true one in training, the drafted one in decoding).
        """
        self._step += 1
        self._row_position_R = self._row_position_R[keep_A]
        self._row_document_R = self._row_document_R[keep_A]
        self._own = [(k[keep_A], v[keep_A]) for k, v in self._own]
        x_AH = self._head.fuse(self._embed(token_A), self._state_RH[keep_A])
        self._own.append(self._head.layer.key_value(x_AH, self._row_position_R + self._step))
        return self._layer(x_AH)

    def _layer(self, x_RH: Tensor) -> Tensor:
        position_R = self._row_position_R + self._step
        q_RND = self._head.layer.query(x_RH, position_R)
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
            mixed.append(attend(q_RND[rows], position_R[rows], visible, last_key, own, self._head.config.layer.sliding_window))
            start += count
        mixed_RND = torch.cat(mixed) if mixed else q_RND
        self._state_RH = self._head.output(self._head.layer.finish(x_RH, mixed_RND))
        return self._state_RH


def true_token_steps(unroll: Unroll, rows: Alignment, token_T: Tensor, final_TH: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each step over its valid rows, fed the true tokens: indices into `rows` [A], ascending, and the draft states [A, H].

    A row that is valid at a step was valid at the step before. `unroll` is new.
    """
    unroll.extend(token_T[rows.input_RK[:, 0]], final_TH[rows.row_R], rows.position_R, rows.document_R)
    alive_A = rows.valid_RK[:, 0].nonzero().squeeze(-1)
    yield alive_A, unroll.start(alive_A)
    for step in range(1, steps):
        keep_A = rows.valid_RK[alive_A, step].nonzero().squeeze(-1)
        alive_A = alive_A[keep_A]
        yield alive_A, unroll.advance(keep_A, token_T[rows.input_RK[alive_A, step]])
