"""The EAGLE-1 head: one decoder layer on the target's final state, without the norms.

    x = W [E[t_{p+1}]; final_p] (+ b)                          W: H x 2H; final: after the target's final norm
    h = x + Attn(x)                                            no input norm
    out = h + MLP(RMSNorm(h))                                  no final norm
    logits = lm_head(out)                                      (out is also the recycled state)

Source: SafeAILab/EAGLE v1 (arXiv 2401.15077), a Llama layer. E and lm_head are the target's, frozen. Its public recipe is smooth-L1 on
the state 1.0 and soft cross-entropy 0.1 (conf/head/eagle.yaml), one step, with noise on the features (`train.feature_noise`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtptrain.config import HeadConfig
from mtptrain.heads.head import DraftHead
from mtptrain.heads.layers import DecoderLayer, LayerConfig, llama_layer_config
from mtptrain.target.spec import TargetSpec


@dataclass(slots=True, kw_only=True)
class EagleConfig:
    layer: LayerConfig
    fc_bias: bool = False


def eagle_config(head: HeadConfig, spec: TargetSpec) -> EagleConfig:
    return EagleConfig(layer=llama_layer_config(spec, head, input_norm=False), fc_bias=head.fc_bias)


class EagleHead(DraftHead):
    """See the module's docstring. Parameters: fc, layer.*."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size = config.layer.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layer = DecoderLayer(config.layer)

    @property
    def fusion(self) -> nn.Linear:
        return self.fc

    def fused(self, embed_RH: Tensor, hidden_RH: Tensor) -> Tensor:
        return torch.cat((embed_RH, hidden_RH), dim=-1)

    def enter(self, embed_RH: Tensor, hidden_RH: Tensor) -> tuple[Tensor, Tensor]:
        x_RH = self.fc(self.fused(embed_RH, hidden_RH))
        return x_RH, x_RH

    def leave(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        return x_RH, x_RH
