"""Is a sample of a known discrete distribution?"""

from scipy.stats import chisquare
from torch import Tensor

_LEAST = 5.0


def chi_square(count_C: Tensor, p_C: Tensor) -> float:
    """p-value of counts against exact cell probabilities; cells that expect fewer than 5 are pooled.

    0.0 where something was drawn from a cell of probability 0.
    """
    observed, expected = count_C.double().flatten(), p_C.double().flatten() * count_C.sum()
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    order = expected.argsort(descending=True)
    order = order[expected[order] > 0]
    large = int((expected[order] >= _LEAST).sum())
    if 0 < float(expected[order[large:]].sum()) < _LEAST:
        large -= 1  # the pool takes in one cell more
    cells = [*([i] for i in order[:large].tolist()), order[large:].tolist()]
    merged = [(float(observed[c].sum()), float(expected[c].sum())) for c in cells if c]
    return float(chisquare(*zip(*merged, strict=True)).pvalue)
