"""The EAGLE-3 head, and with its options EAGLE-3.1: one decoder layer on several streams of the target, with a vocabulary of its own.

    g_0 = W_fc [after_i; after_j; ...]                         no bias; streams between layers, un-normed
    z = [RMSNorm_e(E[t]); RMSNorm_h(g_k)]                      2H, read by q, k and v
    u = g_k + Attn(z)                                          the residual is un-normed
    out = u + MLP(RMSNorm_p(u))
    logits = lm_head(RMSNorm_o(out)), g_{k+1} = out            lm_head: D rows, trainable; draft_ids maps them to the target's ids

Options: `norm_before_fc` norms the concatenated streams at once, `fc_norm` each by itself; with `norm_before_residual` the residual is
RMSNorm_h(g_k); with `norm_output` the recycled state is RMSNorm_o(out). EAGLE-3.1 has fc_norm and norm_output.

Sources: EAGLE-3 (arXiv 2503.01840) and SafeAILab/EAGLE; the options as vLLM's Eagle3LlamaForCausalLM computes them. The public recipe
is a soft cross-entropy against the target's distribution over the draft vocabulary, 0.8^k a step, up to 7 steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtptrain.config import HeadConfig, OutputProjection
from mtptrain.heads.captures import eagle3_captures, eagle3_kv_heads
from mtptrain.heads.head import DraftHead
from mtptrain.heads.layers import DecoderLayer, LayerConfig, RmsNorm, llama_layer_config
from mtptrain.target.spec import TargetSpec


@dataclass(slots=True, kw_only=True)
class Eagle3Config:
    layer: LayerConfig
    captures: list[str]
    """Ascending."""
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    """Rows of the output projection."""
    own_lm_head: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def eagle3_config(head: HeadConfig, spec: TargetSpec, draft_vocab_size: int) -> Eagle3Config:
    kv_heads = eagle3_kv_heads(head, spec)
    return Eagle3Config(
        layer=llama_layer_config(spec, head, input_norm=False, attention_input=2 * spec.hidden_size, num_kv_heads=kv_heads),
        captures=eagle3_captures(head, spec),
        vocab_size=spec.vocab_size,
        draft_vocab_size=draft_vocab_size,
        own_lm_head=head.lm_head is OutputProjection.own,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
    )


class Eagle3Head(DraftHead):
    """See the module's docstring. Parameters: fc, fc_norms.*, input_norm, embed_norm, hidden_norm, layer.*, norm, lm_head."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.captures = tuple(config.captures)
        size, eps, count = config.layer.hidden_size, config.layer.rms_norm_eps, len(config.captures)
        self.fc = nn.Linear(count * size, size, bias=False)
        self.input_norm = RmsNorm(count * size, eps) if config.norm_before_fc else None
        self.fc_norms = nn.ModuleList(RmsNorm(size, eps) for _ in range(count if config.fc_norm else 0))
        self.embed_norm = RmsNorm(size, eps)
        self.hidden_norm = RmsNorm(size, eps)
        self.layer = DecoderLayer(config.layer)
        self.norm = RmsNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        if config.draft_vocab_size < config.vocab_size:
            self.draft_ids = torch.arange(config.draft_vocab_size)

    def streams(self, states: Mapping[str, Tensor]) -> Tensor:
        """What `fc` reads, [R, F]."""
        streams = [states[name] for name in self.captures]
        if self.input_norm is not None:
            streams = list(self.input_norm(torch.cat(streams, dim=-1)).chunk(len(streams), dim=-1))
        if self.fc_norms:
            streams = [norm(stream) for norm, stream in zip(self.fc_norms, streams, strict=True)]
        return torch.cat(streams, dim=-1)

    def feature(self, states: Mapping[str, Tensor]) -> Tensor:
        return self.fc(self.streams(states))

    def enter(self, embed_RH: Tensor, hidden_RH: Tensor) -> tuple[Tensor, Tensor]:
        normed_RH = self.hidden_norm(hidden_RH)
        z_RZ = torch.cat((self.embed_norm(embed_RH), normed_RH), dim=-1)
        return normed_RH if self.config.norm_before_residual else hidden_RH, z_RZ

    def leave(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        y_RH = self.norm(x_RH)
        return y_RH, y_RH if self.config.norm_output else x_RH
