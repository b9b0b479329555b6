"""Candidate folders in a real engine: what they accept, whether the reference head drafts the same, how fast they are.

The engine answers the held-out prompts four ways, each a process of its own: without speculation, with the candidate, with n-gram lookup,
and with a stand-alone draft model where one is given. The reference then replays every draft of the candidate's run on states that
transformers' forward of the target computes from the committed tokens, in the engine's dtype.

Legend: T tokens, H hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mtptrain.batches import Batch
from mtptrain.config import Config, HeadKind
from mtptrain.data.packing import pack
from mtptrain.data.template import load_template
from mtptrain.decoding.compare import Agreement
from mtptrain.decoding.reference import MANTISSA, top_logits
from mtptrain.decoding.replay import replay_drafts
from mtptrain.decoding.walk import DocumentWalk, Draft, draft_all_rows, hop
from mtptrain.engines.process import Engine, engine_inputs
from mtptrain.engines.vllm import Answer, EngineRun, Prompt, Step, answer, answer_job, engine_dtype, llm_arguments, run_to_end
from mtptrain.errors import UserError
from mtptrain.exporters.vllm import METHODS
from mtptrain.files import hash_file, hash_json, read_json, write_json
from mtptrain.heads.alignment import align
from mtptrain.heads.drafter import Drafter, as_served, bind
from mtptrain.heads.head import DraftHead
from mtptrain.heads.lm_head import LmHead, lm_head_of
from mtptrain.heads.unroll import rows_of
from mtptrain.stages.context import Context
from mtptrain.stages.rendering import compare, probes
from mtptrain.store.reader import Store
from mtptrain.target.ends import load_ends, weights_hash
from mtptrain.target.model import capture_packed, load_model

_BATCH_TOKENS = 2048
_CHUNK_ROWS = 512
NONE, HEAD = "none", "head"
RUNS = "runs"
"""Folder inside the report's: finished runs of the engine, one file a way to draft."""
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""vLLM's training-free draft: the continuation of an earlier occurrence of the last tokens."""


@dataclass(slots=True)
class Findings:
    """What engine and reference say of the candidate, over the same documents."""

    engine: list[DocumentWalk] = field(default_factory=list)
    reference: list[DocumentWalk] = field(default_factory=list)
    drafts: Agreement = field(default_factory=Agreement)
    outputs: Agreement = field(default_factory=Agreement)
    """With speculation against without, up to the first difference."""
    target: Agreement = field(default_factory=Agreement)
    """The engine's own greedy tokens against the argmax of transformers' forward on the same context."""
    divergences: list[dict[str, Any]] = field(default_factory=list)
    differing: list[dict[str, Any]] = field(default_factory=list)
    """Drafts that differ without being a tie, and by how much (replay.Difference)."""


def drafts_to_try(cfg: Config, candidate: Path) -> dict[str, dict[str, Any] | None]:
    """Every way to draft, by its name in the report, as vLLM's speculative config (None: no speculation)."""
    drafts: dict[str, dict[str, Any] | None] = {NONE: None, HEAD: draft_of(candidate, cfg.head.kind), "ngram": NGRAM}
    if model := cfg.validate.draft_model:
        folder = Path(model).expanduser().resolve()
        if not (folder / "config.json").exists():
            raise UserError(f"validate.draft_model={model}: no model folder there")
        drafts["draft_model"] = {"method": "draft_model", "model": str(folder)}
    return drafts


def draft_of(candidate: Path, kind: HeadKind) -> dict[str, Any]:
    return {"method": METHODS[kind], "model": str(candidate.resolve())}


def run_trials(
    cfg: Config, context: Context, engine: Engine, drafts: dict[str, dict[str, Any] | None], store: Store, documents: Sequence[int]
) -> dict[str, EngineRun]:
    """The engine over the documents' prompts, once for each way to draft. Its job folder is report/engine, so that the log stays.

    A run that was finished before, on the same prompts, weights, options and versions, is taken from report/runs: an interrupted
    measurement goes on with the ways to draft that are left.
    """
    prompts = _prompts(store, documents)
    longest = max(len(p.tokens) + p.max_tokens for p in prompts)
    template = load_template(context.folder, cfg.target.trust_remote_code)
    stop_ids = sorted(template.stop_ids)
    jobs = {}
    for name, draft in drafts.items():
        speculative = draft and draft | {"num_speculative_tokens": cfg.validate.k}
        arguments = llm_arguments(cfg, context.folder, context.spec, longest, speculative)
        arguments["max_num_seqs"] = max([cfg.engine.batch_size, *cfg.validate.batch_sizes])
        dialogues = [p.asked() for p in probes(template)] if name == NONE else []
        jobs[name] = answer_job(arguments, prompts, stop_ids, cfg.validate.batch_sizes, dialogues)
    folder = cfg.report_dir / RUNS
    about = {
        "prompts": hash_json([asdict(p) for p in prompts]),
        "engine": engine_inputs(cfg, engine),
        "target": weights_hash(context.folder),
    }
    keys = {name: hash_json(about | {"job": _lasting(job), "draft": _draft_hash(drafts[name])}) for name, job in jobs.items()}
    runs = {name: run for name in jobs if (run := _kept(folder / f"{name}.json", keys[name])) is not None}
    if left := {name: job for name, job in jobs.items() if name not in runs}:
        if runs:
            print(f"validate: vLLM has finished {', '.join(runs)} before; {', '.join(left)} left", flush=True)

        def keep(name: str, run: EngineRun) -> None:
            write_json(folder / f"{name}.json", {"key": keys[name], "run": asdict(run)})
            runs[name] = run

        run_to_end("vLLM", len(left) * len(prompts), answer(cfg, engine, cfg.report_dir / "engine", left, prompts), keep)
    return {name: runs[name] for name in jobs}


def rendering(cfg: Config, context: Context, plain: EngineRun) -> dict[str, Any] | None:
    """Whether the run without speculation made of dialogues what the tokenizer makes of them (rendering.compare)."""
    return compare(probes(load_template(context.folder, cfg.target.trust_remote_code)), plain.rendered)


def _lasting(job: dict[str, Any]) -> dict[str, Any]:
    """The job without the share of a GPU that happened to be free."""
    return job | {"llm": {k: v for k, v in job["llm"].items() if k != "gpu_memory_utilization"}}


def _draft_hash(draft: dict[str, Any] | None) -> dict[str, str] | None:
    """Of the folder a draft is loaded from."""
    if draft is None or "model" not in draft:
        return None
    return {file.name: hash_file(file) for file in sorted(Path(draft["model"]).iterdir()) if file.is_file()}


def _kept(path: Path, key: str) -> EngineRun | None:
    """A run that was written whole, if it is the one asked for."""
    if not path.exists() or (found := read_json(path))["key"] != key:
        return None
    values = found["run"]
    answers = {
        name: Answer(a["tokens"], a["stopped"], [Step(s["row"], s["drafted"], s["accepted"]) for s in a["steps"]])
        for name, a in values.pop("answers").items()
    }
    return EngineRun(answers=answers, **values)


def _prompts(store: Store, documents: Sequence[int]) -> list[Prompt]:
    """One a span: the document up to it."""
    return [
        Prompt(id=_name(i, n), tokens=store.tokens(i)[:start].tolist(), max_tokens=end - start)
        for i in documents
        for n, (start, end) in enumerate(store.entries[i].spans)
        if start > 0
    ]


def _name(document: int, span: int) -> str:
    return f"{document}.{span}"


def walks_of(run: EngineRun, store: Store, documents: Sequence[int]) -> list[DocumentWalk]:
    """The engine's decode steps as the walk counts drafts: cut at the span's end; a step without a draft counts as an empty one."""
    walks = []
    for i in documents:
        entry = store.entries[i]
        walk = DocumentWalk(entry.id, entry.source, 0, 0, [])
        for n, (start, _) in enumerate(entry.spans):
            if (found := run.answers.get(_name(i, n))) is not None:
                walk.spans += 1
                walk.generated += len(found.tokens)
                walk.drafts += _cut(found, start + len(found.tokens))
        walks.append(walk)
    return walks


def _cut(found: Answer, end: int) -> Iterator[Draft]:
    for step in found.steps:
        room = end - (step.row + 2)
        if room > 0:
            accepted = min(step.accepted, room)
            yield Draft(step.row, step.drafted[: min(accepted + 1, room)], accepted)


def certify(
    cfg: Config, context: Context, head: DraftHead, store: Store, documents: Sequence[int], plain: EngineRun, speculated: EngineRun
) -> Findings:
    """Compare the candidate's run, and the one without speculation, with the reference. `head` has the weights of the candidate folder."""
    dtype = getattr(torch, engine_dtype(cfg))
    ends = load_ends(context.folder, dtype, context.device)
    lm_head = lm_head_of(ends.spec, ends.lm_head_VH)
    drafter = bind(as_served(head, dtype), ends)
    captures = list(dict.fromkeys(("final", *head.captures)))
    model = load_model(context.folder, dtype, context.device, cfg.target.trust_remote_code)
    findings = Findings(engine=walks_of(speculated, store, documents))
    replays = [(i, n, start) for i in documents for n, (start, _) in enumerate(store.entries[i].spans) if start > 0]
    walks = {i: DocumentWalk(store.entries[i].id, store.entries[i].source, 0, 0, []) for i in documents}
    sequences = [store.tokens(i)[:start].tolist() + speculated.answers[_name(i, n)].tokens for i, n, start in replays]
    with tqdm(total=len(replays), desc="reference replays the engine", unit="resp", mininterval=1) as bar:
        for group in pack([len(s) for s in sequences], _BATCH_TOKENS):
            packed = capture_packed(model, [sequences[g] for g in group], captures)
            starts = [0, *accumulate(len(sequences[g]) for g in group)]
            for g, (first, end) in zip(group, pairwise(starts), strict=True):
                i, n, start = replays[g]
                states = rows_of(packed, slice(first, end))
                final_TH = states["final"]
                tokens_T = torch.tensor(sequences[g], device=context.device)
                drafted, alone = speculated.answers[_name(i, n)], plain.answers[_name(i, n)]
                agreement, firsts = replay_drafts(drafter, tokens_T, states, drafted.steps)
                findings.drafts.add(agreement)
                findings.differing += [
                    {"id": walks[i].id, "row": step.row, "depth": first.depth, "token": step.drafted[first.depth], "margin": first.margin}
                    for step, first in zip(drafted.steps, firsts, strict=True)
                    if first is not None
                ]
                _compare_outputs(findings, walks[i].id, drafted.tokens, alone.tokens, lm_head, final_TH, start)
                _walk(walks[i], drafter, tokens_T, states, start, cfg.validate.k)
            bar.update(len(group))
    findings.reference = [walks[i] for i in documents]
    return findings


def _compare_outputs(
    findings: Findings, name: str, speculated: list[int], plain: list[int], lm_head: LmHead, final_TH: Tensor, start: int
) -> None:
    """Speculated tokens against plain ones up to the first difference, and against the reference's own argmax all along."""
    tops = [t for chunk in final_TH[start - 1 : -1].split(_CHUNK_ROWS) for t in top_logits(lm_head, chunk, final_TH.dtype)]
    for top in tops:
        top.bits = MANTISSA[torch.bfloat16]
    for token, top in zip(speculated, tops, strict=True):
        findings.target.compared += 1
        findings.target.equal += top.choice == token
        findings.target.ties += top.choice != token and top.ties_with(token)
    for at, (ours, theirs) in enumerate(zip(speculated, plain, strict=False)):
        findings.outputs.compared += 1
        if ours != theirs:
            exact = lm_head.logits(final_TH[start - 1 + at][None])[0]
            tie = tops[at].ties_with(ours) and tops[at].ties_with(theirs)
            findings.outputs.ties += tie
            findings.divergences.append({"id": name, "token": at, "tie": tie, "margin": float((exact[ours] - exact[theirs]).abs())})
            return
        findings.outputs.equal += 1
    if len(speculated) != len(plain):
        findings.outputs.compared += 1
        findings.divergences.append({"id": name, "token": min(len(speculated), len(plain)), "tie": False, "margin": None})


def _walk(walk: DocumentWalk, drafter: Drafter, token_T: Tensor, states: dict[str, Tensor], start: int, k: int) -> None:
    """The reference's own walk over the answer: it hops by its own drafts, not by the engine's."""
    spans = [(start, len(token_T))]
    batch = Batch([0], token_T, states, align(len(token_T), spans, k).each(lambda t: t.to(token_T.device)))
    (one,) = hop(draft_all_rows(drafter, batch, k), batch, [spans], [(walk.id, walk.source)], k)
    walk.spans += one.spans
    walk.generated += one.generated
    walk.drafts += one.drafts
