"""A Llama draft layer in float64 and the drafting of one document, from config.json keys and tensor names alone (no import of the package).

What an engine's draft class adds to it is in sglang_contract.py and trtllm_contract.py. Every value of `Reading` but its default is a
convention that some engine or exporter has and this one has not: it shows that a mismatch changes the result.
Legend: P rows of step 0 (row p embeds token p+1), H hidden, Z what q, k, v read, N heads, D head size.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(kw_only=True)
class Reading:
    concat: str = "embed_hidden"
    streams: str = "ascending"
    layer_ids: str = "after"
    residual: str = "hidden"
    recycled: str = "as configured"
    d2t: str = "offset"
    rope_schema: str = "rope_parameters"
    theta_factor: float = 1.0
    position: str = "advances"


class Llama64:
    """`enter`, `leave` and `head` are the engine class's; `prefix` is what it calls the layer."""

    prefix: str

    def __init__(self, folder: Path, embed_VH: Tensor, lm_head_VH: Tensor, reading: Reading) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.file = load_file(folder / "model.safetensors")
        self.w = {name: t.double() for name, t in self.file.items() if t.is_floating_point()}
        self.embed_VH, self.target_lm_head_VH, self.reading = embed_VH.double(), lm_head_VH.double(), reading
        c = self.config
        assert c["num_hidden_layers"] == 1
        self.heads, self.kv, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.angle_MD = torch.arange(c["max_position_embeddings"])[:, None].double() * self._frequencies()

    def enter(self, embed_PH: Tensor, hidden_PH: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer adds to, and what q, k and v read."""
        raise NotImplementedError

    def leave(self, x_PH: Tensor) -> tuple[Tensor, Tensor]:
        """What goes to the output projection, and what the next step gets."""
        raise NotImplementedError

    def head(self) -> tuple[Tensor, Tensor | None]:
        """The output projection and the target's id of each of its rows, None where row i is id i."""
        raise NotImplementedError

    def draft(self, token_T: Tensor, hidden_PH: Tensor, steps: int) -> list[tuple[Tensor, Tensor]]:
        """State [P, H] and greedily drafted token [P] of every row, a pair a step; a later step embeds what the one before drafted."""
        weight_DH, ids_D = self.head()
        token_P, found, own = token_T[1:], [], []
        for step in range(steps):
            position_P = torch.arange(len(token_P)) + (step if self.reading.position == "advances" else 0)
            x_PH, z_PZ = self.enter(self.embed_VH[token_P], hidden_PH)
            q, k, v = (self._project(name, z_PZ, position_P) for name in "qkv")
            if step == 0:
                first = (k, v)
            else:
                own.append((k, v))
            x_PH = x_PH + self._attend(q, first, own) @ self.w[f"{self.prefix}.self_attn.o_proj.weight"].T
            x_PH = x_PH + self._mlp(self.norm(f"{self.prefix}.post_attention_layernorm", x_PH))
            state_PH, hidden_PH = self.leave(x_PH)
            row_P = (state_PH @ weight_DH.T).argmax(-1)
            token_P = row_P if ids_D is None else ids_D[row_P]
            found.append((state_PH, token_P))
        return found

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def _frequencies(self) -> Tensor:
        c = self.config
        if self.reading.rope_schema == "rope_parameters":
            rope = c["rope_parameters"]
        else:
            rope = {"rope_theta": c["rope_theta"]} | (c["rope_scaling"] or {})
        theta = rope["rope_theta"] * self.reading.theta_factor
        plain_D = theta ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        if rope.get("rope_type", "default") == "default":
            return plain_D
        assert rope["rope_type"] == "llama3"
        return torch.stack([_llama3(frequency, rope) for frequency in plain_D])

    def _project(self, name: str, z_PZ: Tensor, position_P: Tensor) -> Tensor:
        x_PND = (z_PZ @ self.w[f"{self.prefix}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, self.size))
        if name != "v":
            angle = self.angle_MD[position_P][:, None]
            a, b = x_PND.chunk(2, -1)
            x_PND = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
        return x_PND if name == "q" else x_PND.repeat_interleave(self.heads // self.kv, 1)

    def _attend(self, q: Tensor, first: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Row p sees the step-0 keys of rows 0..p and its own of every later step."""
        causal = torch.einsum("pnd,knd->npk", q, first[0])
        causal = causal.masked_fill(torch.ones(causal.shape[1:]).triu(1).bool(), float("-inf"))
        diagonal = [torch.einsum("pnd,pnd->np", q, k)[..., None] for k, _ in own]
        weight = (torch.cat([causal, *diagonal], -1) / math.sqrt(self.size)).softmax(-1)
        mixed = torch.einsum("npk,knd->pnd", weight[..., : len(q)], first[1])
        for step, (_, v) in enumerate(own):
            mixed = mixed + weight[..., len(q) + step].T[..., None] * v
        return mixed.flatten(1)

    def _mlp(self, x_PH: Tensor) -> Tensor:
        gate, up = (x_PH @ self.w[f"{self.prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return (gate * gate.sigmoid() * up) @ self.w[f"{self.prefix}.mlp.down_proj.weight"].T


class Llama64Eagle3(Llama64):
    """What both engines' EAGLE-3 classes have in common: q, k and v read [embed; hidden], each normed; the residual is un-normed."""

    def enter(self, embed_PH: Tensor, hidden_PH: Tensor) -> tuple[Tensor, Tensor]:
        normed_PH = self.norm(f"{self.prefix}.hidden_norm", hidden_PH)
        parts = [self.norm(f"{self.prefix}.input_layernorm", embed_PH), normed_PH]
        z_PZ = torch.cat(parts if self.reading.concat == "embed_hidden" else parts[::-1], -1)
        return hidden_PH if self.reading.residual == "hidden" else normed_PH, z_PZ

    def leave(self, x_PH: Tensor) -> tuple[Tensor, Tensor]:
        y_PH = self.norm("norm", x_PH)
        wanted = {"as configured": self.post_norm(), "post_norm": True, "pre_norm": False}[self.reading.recycled]
        return y_PH, y_PH if wanted else x_PH

    def post_norm(self) -> bool:
        """Whether the recycled state is normed."""
        raise NotImplementedError

    def draft_ids(self) -> Tensor | None:
        """The target's ids of the draft vocabulary."""
        if "d2t" not in self.file:
            return None
        offset = self.file["d2t"].long()
        return offset + torch.arange(len(offset)) if self.reading.d2t == "offset" else offset

    def joined(self, entering: dict[int, Tensor], after: list[int]) -> Tensor:
        """The streams after layers `after`, side by side. `entering[i]`: [P, H], the stream that enters layer i."""
        shift = 1 if self.reading.layer_ids == "after" else 0
        streams = [entering[i + shift].double() for i in after]
        return torch.cat(streams if self.reading.streams == "ascending" else streams[::-1], -1)


def _llama3(frequency: Tensor, rope: dict[str, Any]) -> Tensor:
    """Short waves stay, long ones are stretched by `factor`, between them a blend."""
    turns = rope["original_max_position_embeddings"] * float(frequency) / (2 * math.pi)
    blend = min(max((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0.0), 1.0)
    return frequency * (blend + (1 - blend) / rope["factor"])
