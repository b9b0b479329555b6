"""Closed forms: parameters of targets and heads, bytes of a stored token, work of a forward. Nothing here reads a weight."""

from collections.abc import Collection
from dataclasses import replace

from mtptrain.config import HeadConfig, HeadKind, OutputProjection, StoreConfig
from mtptrain.heads.captures import eagle3_captures, eagle3_kv_heads
from mtptrain.store.codec_bytes import state_bytes
from mtptrain.target.spec import Experts, Latent, TargetSpec

TOKEN_BYTES = 5
"""A stored token's id (int32) and mask (bool)."""


def attention_parameters(spec: TargetSpec, *, bias: bool, qk_norm: bool) -> int:
    """q, k, v, o, without the output bias."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = spec.hidden_size * (2 * queries + 2 * keys)
    return matrices + (queries + 2 * keys if bias else 0) + (2 * spec.head_dim if qk_norm else 0)


def latent_attention_parameters(spec: TargetSpec, latent: Latent) -> int:
    """Of MLA, with the norms of its small vectors."""
    key, size = latent.plain + latent.rotated, spec.hidden_size
    rank = latent.query_rank
    queries = size * spec.num_heads * key if rank is None else rank * (size + 1 + spec.num_heads * key)
    keys = size * (latent.rank + latent.rotated) + latent.rank + latent.rank * spec.num_heads * (latent.plain + latent.value)
    return queries + keys + spec.num_heads * latent.value * size


def mlp_parameters(spec: TargetSpec) -> int:
    """gate, up, down."""
    return 3 * spec.hidden_size * spec.intermediate_size


def experts_parameters(spec: TargetSpec, experts: Experts, *, active: bool) -> int:
    """Of one layer's, with their router. `active`: what one token is multiplied with."""
    width = (experts.chosen if active else experts.count) * experts.width + experts.shared_width
    return spec.hidden_size * (3 * width + experts.count + experts.shared_gate)


def layers_parameters(spec: TargetSpec, *, active: bool = False) -> int:
    """All decoder layers of the target, each with its two norms. `active`: what one token is multiplied with."""
    if spec.latent is not None:
        attention = latent_attention_parameters(spec, spec.latent)
    else:
        attention = attention_parameters(spec, bias=spec.attention_bias, qk_norm=spec.qk_norm)
    out_bias = spec.hidden_size if spec.attention_out_bias else 0
    with_experts = spec.experts.layers if spec.experts else 0
    mlps = (spec.num_layers - with_experts) * mlp_parameters(spec)
    if spec.experts:
        mlps += with_experts * experts_parameters(spec, spec.experts, active=active)
    return spec.num_layers * (attention + out_bias + 2 * spec.hidden_size) + mlps


def ends_parameters(spec: TargetSpec) -> int:
    """Embeddings and lm_head: one matrix where they are tied."""
    return spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)


def target_parameters(spec: TargetSpec) -> int:
    """All of the target."""
    return layers_parameters(spec) + spec.hidden_size + ends_parameters(spec)


def head_parameters(head: HeadConfig, spec: TargetSpec) -> int:
    """Trainable parameters: the fusing projection, one layer, the norms that are on, and an output projection of its own."""
    size = spec.hidden_size
    if head.kind is HeadKind.mtp:
        bias = spec.attention_bias if head.attention_bias is None else head.attention_bias
        qk_norm = spec.qk_norm if head.qk_norm is None else head.qk_norm
        n = head.norms
        norms = sum((n.embed, n.hidden, n.input, n.post_attention, n.output)) * size
        return 2 * size**2 + attention_parameters(spec, bias=bias, qk_norm=qk_norm) + mlp_parameters(spec) + norms
    layer = attention_parameters(spec, bias=False, qk_norm=False) + mlp_parameters(spec)
    if head.kind is HeadKind.eagle:
        return 2 * size**2 + (size if head.fc_bias else 0) + layer + size
    streams = len(eagle3_captures(head, spec))
    own = replace(spec, num_kv_heads=eagle3_kv_heads(head, spec))
    layer = attention_parameters(own, bias=False, qk_norm=False) + mlp_parameters(spec)
    wider = size * (own.num_heads + 2 * own.num_kv_heads) * spec.head_dim
    norms = (4 + streams * (head.norm_before_fc + head.fc_norm)) * size
    return streams * size**2 + layer + wider + norms + own_projection_parameters(head, spec)


def draft_vocabulary(head: HeadConfig, spec: TargetSpec) -> int:
    """Most ids the head drafts."""
    return min(head.draft_vocabulary or spec.vocab_size, spec.vocab_size)


def own_projection_parameters(head: HeadConfig, spec: TargetSpec) -> int:
    """Of the output projection that the head trains itself; 0 where it uses the target's."""
    own = head.kind is HeadKind.eagle3 and head.lm_head is OutputProjection.own
    return draft_vocabulary(head, spec) * spec.hidden_size if own else 0


def stored_bytes_per_token(store: StoreConfig, captures: Collection[str], spec: TargetSpec) -> int:
    aux = store.aux_codec or store.codec
    return TOKEN_BYTES + sum(state_bytes((store.codec if c == "final" else aux).name, spec.hidden_size) for c in captures)


def kv_bytes_per_token(spec: TargetSpec, element_bytes: int) -> int:
    """Keys and values of all layers (of MLA as transformers caches them, spread out to every head)."""
    if spec.latent is not None:
        a_head = spec.latent.plain + spec.latent.rotated + spec.latent.value
        return spec.num_layers * spec.num_heads * a_head * element_bytes
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element_bytes
