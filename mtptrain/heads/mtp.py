"""The MTP head: one decoder layer on the target's final state, with every RMSNorm in place.

    e = RMSNorm(E[t_{p+1}])        h = RMSNorm(final_p)        (final: after the target's final norm)
    x = W [e; h]                                               W: H x 2H, no bias
    x' = one pre-norm decoder layer with the target's attention shapes and RoPE
    y = RMSNorm(x')                logits = lm_head(y)         (y is also the recycled state)

Source: the MTP module of DeepSeek-V3 (arXiv 2412.19437, section 2.2). The concatenation is [embedding; hidden], the
embedding at position 0 is used as it is, and the recycled state is post-norm. Norm weights multiply as they are
(w, not 1 + w); a target of the other form is converted on initialisation. E and lm_head are the target's, frozen, and
not part of the head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtptrain.config import HeadConfig
from mtptrain.heads.head import DraftHead
from mtptrain.heads.layers import DecoderLayer, LayerConfig, layer_config, norm_or_identity
from mtptrain.target.spec import TargetSpec


@dataclass(slots=True, kw_only=True)
class MtpConfig:
    layer: LayerConfig
    embed_norm: bool = True
    hidden_norm: bool = True
    output_norm: bool = True


def mtp_config(head: HeadConfig, spec: TargetSpec) -> MtpConfig:
    """The head's shape: the target's, with what `head.*` changes."""
    changes: dict[str, object] = {"input_norm": head.norms.input, "post_attention_norm": head.norms.post_attention}
    for key in ("attention_bias", "qk_norm", "sliding_window"):
        if getattr(head, key) is not None:
            changes[key] = getattr(head, key)
    return MtpConfig(
        layer=layer_config(spec, **changes),
        embed_norm=head.norms.embed,
        hidden_norm=head.norms.hidden,
        output_norm=head.norms.output,
    )


class MtpHead(DraftHead):
    """See the module's docstring. Parameters: enorm, hnorm, eh_proj, layer.*, norm."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.enorm = norm_or_identity(size, eps, config.embed_norm)
        self.hnorm = norm_or_identity(size, eps, config.hidden_norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(config.layer)
        self.norm = norm_or_identity(size, eps, config.output_norm)

    @property
    def fusion(self) -> nn.Linear:
        return self.eh_proj

    def fused(self, embed_RH: Tensor, hidden_RH: Tensor) -> Tensor:
        return torch.cat((self.enorm(embed_RH), self.hnorm(hidden_RH)), dim=-1)

    def enter(self, embed_RH: Tensor, hidden_RH: Tensor) -> tuple[Tensor, Tensor]:
        x_RH = self.eh_proj(self.fused(embed_RH, hidden_RH))
        return x_RH, self.layer.input_layernorm(x_RH)

    def leave(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        y_RH = self.norm(x_RH)
        return y_RH, y_RH
