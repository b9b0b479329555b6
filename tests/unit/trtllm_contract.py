"""What TensorRT-LLM computes from an exported folder, in float64, written from its names and config keys alone (no import of the package).

Eagle3ForCausalLM of tensorrt_llm/_torch/models/modeling_speculative.py; which layers are captured is the server's option or the default of
_torch/speculative/eagle3.py, never the folder.
"""

from pathlib import Path

import torch
from torch import Tensor

from tests.unit.llama64 import Llama64Eagle3, Reading

NAMES = {"fc.weight", "norm.weight"} | {
    f"midlayer.{name}.weight"
    for name in (
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
    )
}


def default_layers(num_layers: int) -> list[int]:
    """Captured where `eagle3_layers_to_capture` is not given; ids of the layers that the streams leave."""
    if num_layers <= 5:
        raise ValueError("not enough layers for the default")
    return [1, num_layers // 2 - 1, num_layers - 4]


class TrtllmEagle3(Llama64Eagle3):
    prefix = "midlayer"

    def __init__(self, folder: Path, embed_VH: Tensor, lm_head_VH: Tensor, **reading: str | float) -> None:
        super().__init__(folder, embed_VH, lm_head_VH, Reading(**reading))  # type: ignore[arg-type]
        c = self.config
        # modeling_auto.py: "Eagle3" is cut out and "EAGLE3" put before where draft_vocab_size exists
        assert "draft_vocab_size" in c
        assert "EAGLE3" + c["architectures"][0].replace("Eagle3", "") == "EAGLE3LlamaForCausalLM"
        assert not c.get("kv_lora_rank")
        assert c["torch_dtype"] in ("bfloat16", "float16", "float32")
        assert not c["attention_bias"]

    def post_norm(self) -> bool:
        return self.config["eagle_config"].get("return_hidden_post_norm", False) or self.config.get("norm_output", False)

    def head(self) -> tuple[Tensor, Tensor | None]:
        c, ids = self.config, self.draft_ids()
        assert (ids is not None) == (c["draft_vocab_size"] != c["vocab_size"])
        if ids is not None:
            assert self.file["d2t"].shape == (c["draft_vocab_size"],)
        return self.w.get("lm_head.weight", self.target_lm_head_VH), ids

    def fuse(self, entering: dict[int, Tensor], layers: list[int]) -> Tensor:
        """g_0 [P, H]. `layers`: what the server captures. fc_norm goes before norm_before_fc, which is then left out."""
        c, joined = self.config, self.joined(entering, sorted(layers))
        assert len(layers) > 1, "the class has no fc for one state"
        assert self.w["fc.weight"].shape == (c["hidden_size"], len(layers) * c["target_hidden_size"])
        if c.get("fc_norm", False):
            joined = torch.cat([self.norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(joined.chunk(len(layers), -1))], -1)
        elif c["eagle_config"].get("norm_before_fc", False):
            joined = self.norm("input_norm", joined)
        return joined @ self.w["fc.weight"].T
