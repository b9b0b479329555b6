"""The reference decoder generates held-out answers again with the real target and head, beside the walk: proof without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from mtptrain.config import Config
from mtptrain.decoding.compare import Agreement, compare_drafts, compare_outputs
from mtptrain.decoding.reference import Generation, greedy, speculate
from mtptrain.decoding.walk import DocumentWalk, Draft
from mtptrain.heads.head import DraftHead
from mtptrain.stages.context import Context
from mtptrain.store.reader import Store
from mtptrain.target.model import load_model
from mtptrain.target.tokenizer import load_tokenizer, stop_token_ids


@dataclass(slots=True)
class ReferenceRun:
    """The reference decoder on some held-out documents."""

    walks: list[DocumentWalk] = field(default_factory=list)
    drafts: Agreement = field(default_factory=Agreement)
    outputs: Agreement = field(default_factory=Agreement)
    divergences: list[dict[str, Any]] = field(default_factory=list)


def run_reference(
    cfg: Config, context: Context, head: DraftHead, store: Store, documents: Sequence[int], drafted: dict[int, dict[int, list[int]]]
) -> ReferenceRun:
    """Generate each span of the documents again with target and head, and compare with the walk.

    The output is compared with the target's own greedy output: the stored response where it was generated greedily by this
    target, else a plain greedy generation made here.
    """
    model = load_model(context.folder, context.dtype, context.device, cfg.target.trust_remote_code)
    stop_ids = set(stop_token_ids(context.folder, load_tokenizer(context.folder, cfg.target.trust_remote_code)))
    result, drafter = ReferenceRun(), context.bind(head)
    for i in tqdm(documents, "reference decoder", unit="document"):
        entry, tokens = store.entries[i], store.tokens(i).tolist()
        walk = DocumentWalk(entry.id, entry.source, 0, 0, [])
        for start, end in entry.spans:
            with context.autocast():
                out = speculate(model, drafter, context.lm_head, tokens[:start], end - start, stop_ids, cfg.validate.k)
                expected = tokens[start:end]
                if out.tokens != expected:
                    expected = greedy(model, context.lm_head, tokens[:start], end - start, stop_ids).tokens
            _add_span(result, walk, out, start, expected, drafted[i] if tokens[start:end] == expected else {})
        result.walks.append(walk)
    return result


def _add_span(
    result: ReferenceRun, walk: DocumentWalk, out: Generation, start: int, expected: list[int], drafted: dict[int, list[int]]
) -> None:
    outputs, common = compare_outputs(out, expected)
    result.outputs.add(outputs)
    if common < max(len(expected), len(out.tokens)):
        result.divergences.append({"id": walk.id, "token": common, "tie": bool(outputs.ties)})
    result.drafts.add(compare_drafts(out, drafted, start + common))
    end = start + len(out.tokens)
    walk.spans += 1
    walk.generated += len(out.tokens)
    for draft in out.drafts:
        room = end - (draft.row + 2)
        if room > 0:
            accepted = min(draft.accepted, room)
            walk.drafts.append(Draft(draft.row, draft.tokens[: min(accepted + 1, room)], accepted))
