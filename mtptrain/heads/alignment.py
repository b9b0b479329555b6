"""The one place where tokens, states and predictions are shifted against one another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Alignment:
    """Rows of one document or of several packed ones. Legend: R rows, K unrolled draft steps.

    All indices are int64 and count tokens of the packed sequence; where a shifted index would leave the document it is
    clamped to the document's last token, and `valid_RK` is False.
    """

    row_R: Tensor
    """Token index whose target state the row starts from."""
    position_R: Tensor
    """RoPE position of the row at step 0; step k uses position + k."""
    document_R: Tensor
    """Number of the document in the packed sequence."""
    input_RK: Tensor
    """Index of the token that is embedded at step k."""
    label_RK: Tensor
    """Index of the token that step k predicts."""
    teacher_RK: Tensor
    """Index of the target state whose logits are step k's teacher (lm_head(final[teacher]) predicts the label)."""
    valid_RK: Tensor
    """Whether step k of the row is trained and counted."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "Alignment":
        """With every tensor changed."""
        return Alignment(**{name: change(getattr(self, name)) for name in self.__slots__})

    def part(self, rows: slice) -> "Alignment":
        """Some of the rows."""
        return self.each(lambda tensor: tensor[rows])


def align(length: int, spans: Sequence[tuple[int, int]], steps: int) -> Alignment:
    """Rows of a document of `length` tokens whose target-generated ranges are `spans` (half-open).

    Row p (0 <= p <= length - 2), step k: input token p+1+k, teacher final[p+1+k], label p+2+k, position p+k.
    valid[p, k]: the tokens p+1 .. p+2+k all lie in one span (an engine never drafts a span's first token: prefill emits it).

    Worked example: length 7, one span (3, 6), i.e. prompt 0 1 2, response 3 4 5, template token 6; steps 2.

        p   input  label  valid      p   input  label  valid
        0   1 2    2 3    - -        3   4 5    5 6    + -     token 4 in, 5 in; 6 is no longer in the span
        1   2 3    3 4    - -        4   5 6    6 6*   - -     label 6 is not in the span
        2   3 4    4 5    + +        5   6 6*   6* 6*  - -     (* clamped)

    Row 2 is the first: its input is the span's first token, which prefill produced, and it drafts the second.
    """
    row_R = torch.arange(max(length - 1, 0))
    step_K = torch.arange(steps)
    input_RK = row_R[:, None] + 1 + step_K
    label_RK = input_RK + 1
    span_T = torch.full((length + steps + 2,), -1)
    for number, (start, end) in enumerate(spans):
        if not 0 <= start < end <= length:
            raise ValueError(f"span ({start}, {end}) does not lie in a document of {length} tokens")
        span_T[start:end] = number
    first_R1 = span_T[row_R + 1][:, None]
    inside_RK = (span_T[label_RK] == first_R1) & (first_R1 >= 0)
    last = max(length - 1, 0)
    return Alignment(
        row_R=row_R,
        position_R=row_R.clone(),
        document_R=torch.zeros_like(row_R),
        input_RK=input_RK.clamp(max=last),
        label_RK=label_RK.clamp(max=last),
        teacher_RK=input_RK.clamp(max=last),
        valid_RK=inside_RK,
    )


def pack_alignments(parts: Sequence[Alignment], lengths: Sequence[int]) -> Alignment:
    """Alignments of documents laid one behind the other: token indices are offset, positions restart."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    moved = list(zip(parts, offsets, strict=False))
    return Alignment(
        row_R=torch.cat([a.row_R + o for a, o in moved]),
        position_R=torch.cat([a.position_R for a in parts]),
        document_R=torch.cat([torch.full_like(a.row_R, d) for d, a in enumerate(parts)]),
        input_RK=torch.cat([a.input_RK + o for a, o in moved]),
        label_RK=torch.cat([a.label_RK + o for a, o in moved]),
        teacher_RK=torch.cat([a.teacher_RK + o for a, o in moved]),
        valid_RK=torch.cat([a.valid_RK for a in parts]),
    )


def supervised_rows(spans: Sequence[tuple[int, int]]) -> int:
    """Number of valid step-0 rows of a document: a span of n tokens has n - 1 (its first token is never drafted).

    A span that starts at token 0 has no row before it and loses one more.
    """
    return sum(max(end - start - 1 - (start == 0), 0) for start, end in spans)
