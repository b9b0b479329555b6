"""The prepare stage: prompts in, token documents with the spans that the target generated out.

Everything that can be refused is refused before the model is loaded. What was generated is on disk at once, so a killed
run continues where it stopped.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from mtptrain import manifest
from mtptrain.config import Config, DataSource, Executor, ResponseBackend, ResponseMode
from mtptrain.config_io import config_yaml
from mtptrain.data.answering import FILE as RESPONSES
from mtptrain.data.answering import AnswerFile, answer_dialogues
from mtptrain.data.dialogues import Dialogue, kept_document, open_dialogue
from mtptrain.data.documents import FILE as DOCUMENTS
from mtptrain.data.documents import HELD_OUT, TRAIN, Document, write_documents
from mtptrain.data.gather import OWN_FILE, Gathered, gather, make_ids_unique
from mtptrain.data.readers import BadRow, Record, Reject, data_hash
from mtptrain.data.render import coloured, samples_html, samples_text
from mtptrain.data.self_prompts import Round, own_prompts, write_user_turns
from mtptrain.data.split import deduplicated, without_overlap
from mtptrain.data.summary import print_summary, say, summarise
from mtptrain.data.template import ChatTemplate, load_template
from mtptrain.engines.process import require_engine
from mtptrain.errors import UserError
from mtptrain.files import append_jsonl, hash_file, hash_json, read_jsonl_durable, write_text
from mtptrain.stages.audit import warning
from mtptrain.stages.generation import Target
from mtptrain.stages.rendering import Rendering, probes
from mtptrain.target.ends import weights_hash
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import read_spec
from mtptrain.target.tokenizer import tokenizer_hash

REJECTS = "rejects.jsonl"
SELF_TURNS = "self_turns.jsonl"
SAMPLES = 20
_RENDERED = 16
"""Of the data's own dialogues: how many an engine's prompts are compared on."""
_FREE_KEYS = ("train", "held_out", "max_rejects", "audit_documents", "responses.batch_size", "responses.backend", "responses.executor")
"""data.* options that don't decide what the documents are, or are replaced by content hashes."""


@dataclass(slots=True, kw_only=True)
class Work:
    """What becomes of the gathered records."""

    dialogues: list[Dialogue] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    cut: int = 0
    audit: dict[str, Any] | None = None
    rendering: dict[str, Any] | None = None


def run(cfg: Config, for_training: bool = False) -> None:
    """Make or resume the documents in `cfg.data_dir`. Raises UserError; `for_training` also where no prompt would be held out."""
    console = Console()
    keep = cfg.data.responses.mode is ResponseMode.keep
    if keep and cfg.data.source is DataSource.self:
        raise UserError("data.responses.mode=keep: data.source=self has no responses to keep; use mode=target, or data.source=files")
    if cfg.data.responses.backend is ResponseBackend.vllm and not keep:
        require_engine(cfg, "data.responses.backend=vllm")
    folder = resolve_target(cfg.target)
    context = read_spec(folder).max_position_embeddings
    if cfg.data.max_length > context:
        raise UserError(f"data.max_length={cfg.data.max_length}: the target's max_position_embeddings is {context}; set it to at most that")
    template = load_template(folder, cfg.target.trust_remote_code)
    inputs = stage_inputs(cfg, folder, sorted(template.stop_ids))
    if manifest.is_complete(cfg.data_dir, inputs, cfg.on_stale):
        say(console, f"{cfg.data_dir} is complete")
        return
    found = gather(cfg.data, cfg.seed)
    if for_training and found.train and not found.held_out:  # without any record the rejects are told below
        raise UserError(
            f"no prompt is held out of {len(found.train)}, and a head is chosen and measured on held-out ones; "
            "raise data.held_out_fraction or name a file in data.held_out"
        )
    work = _begin_work(cfg, found, template)
    rejects = [*found.rejects, *work.rejects]
    _write_rejects(cfg.data_dir, rejects)
    _check_template(work, found, template, keep)
    _stop_if_too_many(cfg, rejects, found.rows)
    manifest.begin(cfg.data_dir, inputs)
    write_text(cfg.data_dir / "config.yaml", config_yaml(cfg))
    o = cfg.data.responses
    by_engine = o.backend is ResponseBackend.vllm and o.executor is Executor.local and not keep
    with Target(cfg, folder, sorted(template.stop_ids), _to_render(work, template) if by_engine else []) as target:
        if not keep:
            _generate(cfg, found, work, template, target)
        work.rendering = target.rendering()
        work.audit = target.audit(work.documents)
    _finish(cfg, console, inputs, found, work, template)


def stage_inputs(cfg: Config, folder: Path, stop_ids: list[int]) -> dict[str, Any]:
    """Everything that determines the documents."""
    inputs: dict[str, Any] = {
        "target": weights_hash(folder),
        "tokenizer and template": tokenizer_hash(folder),
        "stop_ids": stop_ids,
        "target.dtype": cfg.target.dtype.name,
        "seed": cfg.seed,
        "data.train": [[Path(p).name, data_hash(p)] for p in cfg.data.train],
        "data.held_out": [[Path(p).name, data_hash(p)] for p in cfg.data.held_out],
    }
    options = asdict(cfg.data)
    if cfg.data.source is DataSource.self:
        inputs[OWN_FILE] = hash_json(own_prompts())
    else:
        del options["self_prompts"]
    return inputs | _flat("data", options)


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """{"data.responses.mode": "target", ...} without the options that decide nothing."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict):
            flat |= _flat(name, value)
        elif name.removeprefix("data.") not in _FREE_KEYS:
            flat[name] = value.name if isinstance(value, Enum) else value
    return flat


def _begin_work(cfg: Config, found: Gathered, template: ChatTemplate) -> Work:
    """Documents (mode=keep) or opened dialogues (mode=target) of all gathered records, and what had to be rejected."""
    keep = cfg.data.responses.mode is ResponseMode.keep
    template.check_prompt()
    if keep:
        template.check_kept()
    work = Work()
    records = [(r, TRAIN) for r in found.train] + [(r, HELD_OUT) for r in found.held_out]
    for record, split in tqdm(records, desc="prompts", unit="doc", mininterval=1, delay=2):
        if keep:
            _keep(cfg, record, split, template, work)
        else:
            _open(cfg, record, split, template, work)
    return work


def _to_render(work: Work, template: ChatTemplate) -> list[Rendering]:
    """Dialogues to compare an engine's prompts on: some of the data's, and a few that have made trouble."""
    step = max(1, len(work.dialogues) // _RENDERED)
    own = [Rendering(list(d.turns[0]), d.record.tools, list(d.tokens)) for d in work.dialogues[::step][:_RENDERED]]
    return own + probes(template)


def _keep(cfg: Config, record: Record, split: str, template: ChatTemplate, work: Work) -> None:
    try:
        document, cut = kept_document(record, split, template, cfg.data.max_length, cfg.data.min_supervised)
    except BadRow as bad:
        work.rejects.append(_reject(record, bad))
        return
    work.documents.append(document)
    work.cut += cut


def _open(cfg: Config, record: Record, split: str, template: ChatTemplate, work: Work) -> None:
    try:
        dialogue = open_dialogue(record, split, template, _most_prompt(cfg))
    except BadRow as bad:
        work.rejects.append(_reject(record, bad))
        return
    samples = cfg.data.responses.samples if split == TRAIN else 1
    again = [open_dialogue(replace(record), split, template, _most_prompt(cfg)) for _ in range(samples - 1)]
    work.dialogues += [dialogue, *again]


def _most_prompt(cfg: Config) -> int:
    return cfg.data.max_length - cfg.data.responses.max_new_tokens


def _reject(record: Record, bad: BadRow) -> Reject:
    return Reject(file=record.file, line=record.line, id=record.id, reason=bad.reason, detail=bad.detail)


def _check_template(work: Work, found: Gathered, template: ChatTemplate, keep: bool) -> None:
    """Refuse a template that can't continue a dialogue exactly, if there is one to continue."""
    if keep:
        if any(sum(m["role"] == "assistant" for m in r.messages) > 1 for r in [*found.train, *found.held_out]):
            template.check_history(generated=False)
    elif any(len(d.turns) > 1 for d in work.dialogues):
        template.check_history(generated=True)


def _stop_if_too_many(cfg: Config, rejects: Sequence[Reject], rows: int) -> None:
    if len(rejects) <= cfg.data.max_rejects * rows:
        return
    reasons = Counter(r.reason for r in rejects)
    told = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
    first = next(r for r in rejects if r.reason == reasons.most_common(1)[0][0])
    raise UserError(
        f"{len(rejects)} of {rows} records are rejected, more than data.max_rejects={cfg.data.max_rejects} allows: {told} "
        f"(first: {first.file}:{first.line}: {first.detail or first.reason}); all are listed in {cfg.data_dir / REJECTS}; "
        "mend the data or raise data.max_rejects"
    )


def _generate(cfg: Config, found: Gathered, work: Work, template: ChatTemplate, target: Target) -> None:
    if cfg.data.source is DataSource.self:
        for record in self_records(cfg, found, template, target):
            _open(cfg, record, TRAIN, template, work)
    make_ids_unique([d.record for d in work.dialogues])
    file = AnswerFile(cfg.data_dir / RESPONSES)
    train, held_out = ([d for d in work.dialogues if d.split == split] for split in (TRAIN, HELD_OUT))
    if cfg.data.responses.temperature == 0:
        answer_dialogues(work.dialogues, template, file, target.answer, _most_prompt(cfg))
    else:
        answer_dialogues(train, template, file, target.answer, _most_prompt(cfg))
        answer_dialogues(held_out, template, file, target.answer_greedily, _most_prompt(cfg))
    for dialogue in work.dialogues:
        try:
            work.documents.append(dialogue.document(cfg.data.min_supervised))
        except BadRow as bad:
            work.rejects.append(_reject(dialogue.record, bad))


def self_records(cfg: Config, found: Gathered, template: ChatTemplate, target: Target) -> list[Record]:
    """Records of user turns that the target writes until there are data.self_prompts.count; none shares a prompt with held-out."""
    path = cfg.data_dir / SELF_TURNS
    rounds = [Round(row["texts"], row["attempts"]) for row in read_jsonl_durable(path)]
    count, options = sum(len(r.texts) for r in rounds), cfg.data.self_prompts
    if count < options.count:
        known = {m["content"] for r in [*found.train, *found.held_out] for m in r.messages}
        stop_ids = sorted(template.stop_ids)
        turns = write_user_turns(target.write, template.tokenizer, stop_ids, options, known, done=tuple(rounds))
        with tqdm(total=options.count, initial=count, desc="user turns", unit="turn", mininterval=1) as bar:
            for new_round in turns:
                append_jsonl(path, [asdict(new_round)])
                rounds.append(new_round)
                bar.update(len(new_round.texts))
    texts = [text for r in rounds for text in r.texts]
    records = [
        Record(id=f"self-{n:05d}", source="self", messages=[{"role": "user", "content": text}], file=SELF_TURNS, line=n)
        for n, text in enumerate(texts[: cfg.data.self_prompts.count], 1)
    ]
    found.rows += len(records)
    new, dropped = deduplicated([*found.train, *records], with_answers=False)
    found.dropped["duplicate"] += dropped
    new, dropped = without_overlap(new[len(found.train) :], found.held_out)
    found.dropped["shares a prompt with held-out"] += dropped
    make_ids_unique([*found.train, *found.held_out, *new])
    return new


def _write_rejects(folder: Path, rejects: Sequence[Reject]) -> None:
    write_text(folder / REJECTS, "".join(json.dumps(asdict(r)) + "\n" for r in rejects))


def _finish(cfg: Config, console: Console, inputs: dict[str, Any], found: Gathered, work: Work, template: ChatTemplate) -> None:
    documents = sorted(work.documents, key=lambda d: d.split == HELD_OUT)
    rejects = [*found.rejects, *work.rejects]
    _write_rejects(cfg.data_dir, rejects)
    if not any(d.split == TRAIN for d in documents):
        first = next((f" (first: {r.file}:{r.line}: {r.detail or r.reason})" for r in rejects), "")
        raise UserError(f"no training document is left{first}; see {cfg.data_dir / REJECTS} and give more or better data")
    write_documents(cfg.data_dir, documents)
    write_text(cfg.data_dir / "samples.txt", samples_text(documents[:SAMPLES], template))
    write_text(cfg.data_dir / "samples.html", samples_html(documents[:SAMPLES], template))
    say(console, "one document; what the target generates, and so what is trained, is green")
    console.print(coloured(documents[0], template), soft_wrap=True)
    results = summarise(documents, template.stop_ids, rejects, found.dropped, work.cut, _unanswered(work.dialogues), found.rows)
    results |= {"audit": work.audit, "rendering": work.rendering}
    manifest.finish(cfg.data_dir, inputs, results | {DOCUMENTS: hash_file(cfg.data_dir / DOCUMENTS)})
    print_summary(console, cfg.data_dir, results)
    if work.audit and (told := warning(work.audit)):
        say(console, told, style="bold red")
    if work.rendering and (told := work.rendering["told"]):
        say(console, f"WARNING: {told}", style="bold red")


def _unanswered(dialogues: Sequence[Dialogue]) -> Counter[str]:
    """User turns without an answer, by reason."""
    counts: Counter[str] = Counter()
    for dialogue in dialogues:
        if dialogue.unanswered:
            counts[dialogue.ended] += dialogue.unanswered
    return counts
