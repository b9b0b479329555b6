"""Do two measurements of the same head agree, token for token?"""

from dataclasses import dataclass

from mtptrain.decoding.reference import Generation


@dataclass(slots=True)
class Agreement:
    """Counts of compared tokens; a tie is a difference inside two units in the last place of bfloat16."""

    equal: int = 0
    ties: int = 0
    compared: int = 0

    def add(self, other: "Agreement") -> None:
        self.equal += other.equal
        self.ties += other.ties
        self.compared += other.compared

    @property
    def agreement(self) -> float:
        """(equal + ties) / compared; 1.0 where nothing was compared."""
        return (self.equal + self.ties) / self.compared if self.compared else 1.0

    @property
    def raw(self) -> float:
        return self.equal / self.compared if self.compared else 1.0


def compare_outputs(reference: Generation, expected: list[int]) -> tuple[Agreement, int]:
    """Generated tokens against the target's own greedy ones, up to the first difference; also the length of their common beginning."""
    agreement = Agreement()
    for i, (token, top) in enumerate(zip(expected, reference.top, strict=False)):
        agreement.compared += 1
        if top.choice != token:
            agreement.ties += top.ties_with(token)
            return agreement, i
        agreement.equal += 1
    if len(reference.tokens) != len(expected):
        agreement.compared += 1
    return agreement, min(len(expected), len(reference.tokens))


def compare_drafts(reference: Generation, drafted: dict[int, list[int]], common_end: int) -> Agreement:
    """Drafted tokens of the same rows, each draft up to its first difference.

    `drafted`: row p -> tokens drafted from it by the walk, up to its first miss. A row p is compared while the tokens up to p+1,
    which it starts from, are common to both (p+1 < `common_end`, a position in the document).
    """
    agreement = Agreement()
    for draft, tops in zip(reference.drafts, reference.draft_top, strict=True):
        if draft.row + 1 >= common_end or draft.row not in drafted:
            continue
        for token, top in zip(drafted[draft.row], tops, strict=False):
            agreement.compared += 1
            if top.choice != token:
                agreement.ties += top.ties_with(token)
                break
            agreement.equal += 1
    return agreement
