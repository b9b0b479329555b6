"""How report.html writes numbers and names. What was not measured is a dash."""

from collections.abc import Sequence
from typing import Any

MISSING = "–"
SPACE = "\N{NO-BREAK SPACE}"
MEASUREMENTS = {"walk": "offline walk", "reference": "reference decoder", "engine": "serving engine"}
METHODS = {"none": "no speculation", "head": "this head", "ngram": "n-gram lookup", "draft_model": "draft model"}
PROOFS = {
    "engine": "The exported folder ran in the real serving engine",
    "reference": "The real target and the real head decoded together in plain torch; no engine has read the exported folder yet",
    "contract": "The exported folder was read back by names taken from the engine; neither target nor engine ran it",
}


def name_of(key: str) -> str:
    """A measurement or method in words; one that has no words of its own keeps its name."""
    return (MEASUREMENTS | METHODS).get(key) or key.replace("_", " ")


def number(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def draft_length(k: int) -> str:
    return f"K{SPACE}={SPACE}{k}"


def numbered(noun: str, total: int) -> list[str]:
    """Column titles: depth 1, depth 2, ..."""
    return [f"{noun}{SPACE}{i + 1}" for i in range(total)]


def count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share of 1. What is not quite all or nothing is never rounded to it."""
    if value is None:
        return MISSING
    if value in (0, 1):
        return f"{100 * value:g}{SPACE}%"
    text = f"{100 * value:.{digits}f}"
    edge = 10**-digits
    if value < 1 and float(text) >= 100:
        text = f">{SPACE}{100 - edge:.{digits}f}"
    elif value > 0 and float(text) == 0:
        text = f"<{SPACE}{edge:.{digits}f}"
    return f"{text}{SPACE}%"


def interval(ci: Sequence[float] | None) -> str:
    return MISSING if ci is None else f"{ci[0]:.3f} – {ci[1]:.3f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.1f} s"


def fact(key: str, value: Any) -> str:
    """A leaf of the report's records (target, head, training, versions)."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("seconds"):
        return duration(value)
    if isinstance(value, int):
        return count(value)
    if isinstance(value, float):
        return number(value) if "length" in key else f"{value:g}"
    if isinstance(value, list):
        return ", ".join(fact(key, v) for v in value) or MISSING
    return str(value)
