"""What SGLang 0.5.23 computes from an exported folder, in float64, written from its names and config keys alone (no import of the package).

LlamaForCausalLMEagle and LlamaForCausalLMEagle3 of sglang/srt/models; which streams the target hands over is set_eagle3_layers_to_capture
of llama.py with the ids of eagle_config (spec_aux_hidden_state.py).
"""

from pathlib import Path

import torch
from torch import Tensor

from tests.unit.llama64 import Llama64, Llama64Eagle3, Reading

_LAYER = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")} | {"post_attention_layernorm"}
EAGLE_NAMES = {"fc.weight", "fc.bias"} | {f"layers.0.{name}.weight" for name in _LAYER}
EAGLE3_NAMES = {"fc.weight", "norm.weight"} | {f"midlayer.{name}.weight" for name in _LAYER | {"input_layernorm", "hidden_norm"}}


class SglangEagle(Llama64):
    """Names that the class lacks are passed over, and what the file lacks keeps its first values: fc is a torch Linear with a bias."""

    prefix = "layers.0"

    def __init__(self, folder: Path, embed_VH: Tensor, lm_head_VH: Tensor, **reading: str | float) -> None:
        super().__init__(folder, embed_VH, lm_head_VH, Reading(**reading))  # type: ignore[arg-type]
        assert self.config["architectures"] == ["LlamaForCausalLMEagle"]
        torch.manual_seed(0)
        self.w = {"fc.bias": torch.nn.Linear(2 * self.config["hidden_size"], self.config["hidden_size"]).bias.detach().double()} | self.w

    def enter(self, embed_PH: Tensor, hidden_PH: Tensor) -> tuple[Tensor, Tensor]:
        parts = [embed_PH, hidden_PH.double()]
        x_PH = torch.cat(parts if self.reading.concat == "embed_hidden" else parts[::-1], -1) @ self.w["fc.weight"].T + self.w["fc.bias"]
        return x_PH, x_PH

    def leave(self, x_PH: Tensor) -> tuple[Tensor, Tensor]:
        return x_PH, x_PH

    def head(self) -> tuple[Tensor, Tensor | None]:
        return self.target_lm_head_VH, None


class SglangEagle3(Llama64Eagle3):
    prefix = "midlayer"

    def __init__(self, folder: Path, embed_VH: Tensor, lm_head_VH: Tensor, **reading: str | float) -> None:
        super().__init__(folder, embed_VH, lm_head_VH, Reading(**reading))  # type: ignore[arg-type]
        assert self.config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert not self.config["tie_word_embeddings"]

    def post_norm(self) -> bool:
        return self.config.get("norm_output", False)

    def head(self) -> tuple[Tensor, Tensor | None]:
        size = self.config["draft_vocab_size"]  # read without a default
        if size is None:
            return self.target_lm_head_VH, self.draft_ids()
        assert self.w["lm_head.weight"].shape == (size, self.config["hidden_size"])
        return self.w["lm_head.weight"], self.draft_ids()

    def fuse(self, entering: dict[int, Tensor]) -> Tensor:
        """g_0 [P, H]; without ids of its own the target captures what enters layers 2, N//2 and N-3."""
        ids = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        # layers run from 0 to N-1, and a state is taken where it enters one: nothing after the last
        assert all(i + 1 < max(entering) for i in ids)
        joined = self.joined(entering, ids)
        count = self.config.get("num_aux_hidden_states") or len(ids)
        assert self.w["fc.weight"].shape == (self.config["hidden_size"], count * self.config["target_hidden_size"])
        assert joined.shape[-1] != self.config["hidden_size"], "the class takes such a state for a recycled one and leaves fc out"
        if self.config["eagle_config"].get("norm_before_fc", self.config.get("norm_before_fc", False)):
            joined = self.norm("input_norm", joined)
        if self.config.get("fc_norm"):
            joined = torch.cat([self.norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(joined.chunk(count, -1))], -1)
        return joined @ self.w["fc.weight"].T
