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
from mtptrain.errors import UserError
from mtptrain.heads.layers import DecoderLayer, LayerConfig, RmsNorm, layer_config, norm_or_identity
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


class MtpHead(nn.Module):
    """See the module's docstring. Parameters: enorm, hnorm, eh_proj, layer.*, norm."""

    captures = ("final",)

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.enorm = norm_or_identity(size, eps, config.embed_norm)
        self.hnorm = norm_or_identity(size, eps, config.hidden_norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(config.layer)
        self.norm = norm_or_identity(size, eps, config.output_norm)

    def fuse(self, embed_RH: Tensor, hidden_RH: Tensor) -> Tensor:
        """Layer input x from token embeddings and the target's (or the recycled) state."""
        return self.eh_proj(torch.cat((self.enorm(embed_RH), self.hnorm(hidden_RH)), dim=-1))

    def output(self, x_RH: Tensor) -> Tensor:
        """The state that goes to lm_head and is recycled."""
        return self.norm(x_RH)


def init_random(head: MtpHead, std: float, seed: int) -> None:
    """Matrices ~ N(0, std), drawn in the order of their names; norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(head.named_parameters()):
            if parameter.dim() == 2:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def init_from_last_layer(head: MtpHead, spec: TargetSpec, layer: dict[str, Tensor], final_norm_H: Tensor) -> None:
    """Decoder layer and norms from the target's last layer and final norm; call after `init_random`.

    `layer` maps names inside the layer to tensors; eh_proj, enorm and hnorm stay as `init_random` made them. Raises UserError
    where the target's layer has other parts than the head's.
    """
    if spec.hidden_act not in ("silu", "swish"):
        raise UserError(f"head.init=last_layer: the target's activation is {spec.hidden_act}, the head's is silu; use head.init=random")
    own = dict(head.layer.named_parameters())
    switched_off = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    if missing := sorted(set(layer) - set(own) - switched_off):
        raise UserError(f"head.init=last_layer: the target's last layer has {missing[0]}, which the head has not; use head.init=random")
    if absent := sorted(set(own) - set(layer)):
        raise UserError(f"head.init=last_layer: the target's last layer lacks {absent[0]}; use head.init=random")
    with torch.no_grad():
        for name, parameter in own.items():
            offset = spec.rms_norm_offset if "norm" in name else 0.0
            parameter.copy_(layer[name].float() + offset)
        if isinstance(head.norm, RmsNorm):
            head.norm.weight.copy_(final_norm_H.float() + spec.rms_norm_offset)


def build_head(head_config: HeadConfig, spec: TargetSpec) -> MtpHead:
    return MtpHead(mtp_config(head_config, spec))
