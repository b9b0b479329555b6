"""What the prepare stage made, as numbers for the manifest and as a short table."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mtptrain.data.documents import HELD_OUT, TRAIN, Document

if TYPE_CHECKING:
    from mtptrain.data.readers import Reject  # takes two seconds, of which the store's commands need none


def summarise(
    documents: Sequence[Document],
    stop_ids: Collection[int],
    rejects: "Sequence[Reject]",
    dropped: Mapping[str, int],
    cut: int,
    unanswered: Mapping[str, int],
    rows: int,
) -> dict[str, Any]:
    """The manifest's results. A response that hit the limit is a span without an end marker; its length is in tokens."""
    sources = sorted({d.source for d in documents})
    return {
        "rows": rows,
        "all": _count(documents, stop_ids),
        "splits": {s: _count([d for d in documents if d.split == s], stop_ids) for s in (TRAIN, HELD_OUT)},
        "sources": {
            source: {
                s: _count(group, stop_ids)
                for s in (TRAIN, HELD_OUT)
                if (group := [d for d in documents if (d.source, d.split) == (source, s)])
            }
            for source in sources
        },
        "rejects": dict(Counter(r.reason for r in rejects).most_common()),
        "dropped": {reason: n for reason, n in dropped.items() if n},
        "cut": cut,
        "unanswered_turns": dict(unanswered),
    }


def _count(documents: Sequence[Document], stop_ids: Collection[int]) -> dict[str, Any]:
    spans = [(d, start, end) for d in documents for start, end in d.spans]
    supervised = sum(end - start for _, start, end in spans)
    at_limit = sum(d.tokens[end - 1] not in stop_ids for d, _, end in spans)
    return {
        "documents": len(documents),
        "tokens": sum(len(d.tokens) for d in documents),
        "supervised_tokens": supervised,
        "responses": len(spans),
        "mean_response_length": supervised / len(spans) if spans else None,
        "document_lengths": _histogram([len(d.tokens) for d in documents]),
        "response_lengths": _histogram([end - start for _, start, end in spans]),
        "hit_limit_share": at_limit / len(spans) if spans else None,
    }


def _histogram(lengths: Sequence[int]) -> dict[str, int]:
    """How many lengths lie in [2^k, 2^(k+1)), by its lower end."""
    counts = Counter(n.bit_length() - 1 for n in lengths)
    return {str(2**k): counts[k] for k in range(min(counts), max(counts) + 1)} if counts else {}


def say(console: Console, text: str, style: str | None = None) -> None:
    """One line as it is: names of files and sources are no markup."""
    console.print(f"prepare: {text}", style=style, markup=False, highlight=False, soft_wrap=True)


def print_summary(console: Console, folder: Path, results: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("documents", "tokens", "supervised", "share", "mean response", "hit limit"):
        table.add_column(name, justify="right")
    for split, counts in results["splits"].items():
        table.add_row(split, *_cells(counts))
    for source, splits in results["sources"].items():
        for split, counts in splits.items():
            table.add_row(f"  {source} ({split})".replace("[", r"\["), *_cells(counts))
    console.print(table)
    for what in ("document", "response"):
        told = ", ".join(f"{n:,} from {low}" for low, n in results["all"][f"{what}_lengths"].items() if n)
        say(console, f"{what}s by length in tokens: {told}")
    _print_audit(console, results["audit"])
    if (rendering := results["rendering"]) is None:
        say(console, "prompts were not compared with an engine's own (no engine answered; validate compares them)")
    else:
        say(console, f"prompts of {rendering['dialogues']} dialogues: {rendering['equal']} are the engine's own, token for token")
    for key, words in (("rejects", "rejected:"), ("dropped", "dropped:"), ("unanswered_turns", "turns left unanswered, because")):
        if results[key]:
            say(console, f"{words} " + "; ".join(f"{reason} ({n:,})" for reason, n in results[key].items()))
    if results["cut"]:
        say(console, f"{results['cut']} documents cut at data.max_length")
    say(console, f"{folder / 'documents.parquet'}; look at {folder / 'samples.html'}")


def _print_audit(console: Console, audit: Mapping[str, Any] | None) -> None:
    if audit is None:
        told = "responses were not scored (data.audit_documents=0, or precompute.backend=vllm)"
    else:
        share, excess, error = audit["first_choice_share"], audit["excess_nats"], audit["excess_standard_error"]
        told = (
            f"{audit['tokens']:,} response tokens of {audit['documents']} documents scored by the target: {share:.1%} are its first "
            f"choice, {excess:+.2f} +- {error:.2f} nats against its own samples"
        )
    say(console, told)


def _cells(counts: Mapping[str, Any]) -> list[str]:
    mean, share = counts["mean_response_length"], counts["hit_limit_share"]
    return [
        f"{counts['documents']:,}",
        f"{counts['tokens']:,}",
        f"{counts['supervised_tokens']:,}",
        f"{counts['supervised_tokens'] / counts['tokens']:.0%}" if counts["tokens"] else "-",
        "-" if mean is None else f"{mean:.1f}",
        "-" if share is None else f"{share:.1%}",
    ]
