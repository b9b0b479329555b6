"""vLLM's side of the norm-complete MTP head (heads/mtp.py), for a target of any kind and any number of tensor-parallel ranks.

    x = W [norm(embed); norm(hidden)]      x' = pre-norm GQA/SwiGLU layer      y = norm(x')

y feeds lm_head and is the recycled state; embeddings and lm_head are the target's. Each norm can be absent, as the head's config says.
The config is a Llama config with `mtptrain_head` beside it (exporters/vllm_plugin.py writes it).

Legend: T tokens, H hidden size.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsEagle
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, process_eagle_weight

_STACKED = {
    ".q_proj": (".qkv_proj", "q"),
    ".k_proj": (".qkv_proj", "k"),
    ".v_proj": (".qkv_proj", "v"),
    ".gate_proj": (".gate_up_proj", 0),
    ".up_proj": (".gate_up_proj", 1),
}


def _norm(size: int, eps: float, wanted: bool) -> nn.Module:
    return RMSNorm(size, eps=eps) if wanted else nn.Identity()


class HeadAttention(nn.Module):
    """Grouped-query attention with the target's shapes: biases, q and k norms and a window where it has them."""

    def __init__(self, config: Any, head: dict[str, Any], cache_config: Any, prefix: str) -> None:
        super().__init__()
        ranks, size = get_tensor_model_parallel_world_size(), config.head_dim
        self.size = size
        self.heads, self.kv_heads = config.num_attention_heads // ranks, max(1, config.num_key_value_heads // ranks)
        self.qkv_proj = QKVParallelLinear(
            hidden_size=config.hidden_size,
            head_size=size,
            total_num_heads=config.num_attention_heads,
            total_num_kv_heads=config.num_key_value_heads,
            bias=config.attention_bias,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            input_size=config.num_attention_heads * size, output_size=config.hidden_size, bias=False, prefix=f"{prefix}.o_proj"
        )
        self.q_norm = _norm(size, config.rms_norm_eps, head["qk_norm"])
        self.k_norm = _norm(size, config.rms_norm_eps, head["qk_norm"])
        self.rotary_emb = get_rope(
            size, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters, is_neox_style=True
        )
        self.attn = Attention(
            self.heads,
            size,
            size**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=cache_config,
            per_layer_sliding_window=head["sliding_window"] or None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x_TH: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(x_TH)
        q, k, v = qkv.split([self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size], dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.size)).contiguous()).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self.size)).contiguous()).flatten(-2)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v))
        return out


class HeadMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [size] * 2, bias=False, prefix=f"{prefix}.gate_up_proj")
        self.down_proj = RowParallelLinear(size, config.hidden_size, bias=False, prefix=f"{prefix}.down_proj")
        self.act = SiluAndMul()

    def forward(self, x_TH: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x_TH)
        out, _ = self.down_proj(self.act(gate_up))
        return out


class HeadLayer(nn.Module):
    def __init__(self, config: Any, head: dict[str, Any], cache_config: Any, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = _norm(config.hidden_size, config.rms_norm_eps, head["input_norm"])
        self.self_attn = HeadAttention(config, head, cache_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = _norm(config.hidden_size, config.rms_norm_eps, head["post_attention_norm"])
        self.mlp = HeadMlp(config, f"{prefix}.mlp")

    def forward(self, positions: Tensor, x_TH: Tensor) -> Tensor:
        x_TH = x_TH + self.self_attn(positions, self.input_layernorm(x_TH))
        return x_TH + self.mlp(self.post_attention_layernorm(x_TH))


@support_torch_compile
class HeadModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", first_layer: int = 0) -> None:
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        head = config.mtptrain_head
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_scale = head["embed_scale"]
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, prefix=f"{prefix}.embed_tokens")
        self.enorm = _norm(size, eps, head["embed_norm"])
        self.hnorm = _norm(size, eps, head["hidden_norm"])
        self.eh_proj = ReplicatedLinear(2 * size, size, bias=False, prefix=f"{prefix}.eh_proj", return_bias=False)
        # its number follows the target's layers: the key/value cache is found by it
        self.layers = nn.ModuleList([HeadLayer(config, head, vllm_config.cache_config, f"{prefix}.layers.{first_layer}")])
        self.norm = _norm(size, eps, head["output_norm"])

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> Tensor:
        embed_TH = self.embed_tokens(input_ids)
        if self.embed_scale != 1.0:
            embed_TH = embed_TH * self.embed_scale
        x_TH = self.eh_proj(torch.cat((self.enorm(embed_TH), self.hnorm(hidden_states)), dim=-1))
        return self.norm(self.layers[0](positions, x_TH))


class EagleMtpHead(nn.Module, SupportsEagle):
    """vLLM's entry: method `eagle`, architectures ["EagleMtpHead"]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        head = self.config.mtptrain_head
        target_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.model = HeadModel(vllm_config=vllm_config, prefix=f"{prefix}.model" if prefix else "model", first_layer=target_layers)
        self.logits_processor = LogitsProcessor(self.config.vocab_size, scale=head["logit_scale"], soft_cap=head["logit_softcap"])

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The state for lm_head and the one to recycle: both are the normed output."""
        if inputs_embeds is not None:
            raise NotImplementedError("EagleMtpHead drafts from token ids, not from embeddings")
        state_TH = self.model(input_ids, positions, hidden_states)
        return state_TH, state_TH

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)  # vLLM puts the target's lm_head here

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Every parameter of the head must come from the file, and every tensor of the file must have a place."""

        def named() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                process_eagle_weight(self, name)
                yield f"model.{name}", tensor

        loaded = AutoWeightsLoader(self).load_weights(named(), mapper=WeightsMapper(orig_to_new_stacked=_STACKED))
        wanted = {name for name, _ in self.named_parameters() if "embed_tokens" not in name and not name.startswith("lm_head")}
        if missing := sorted(wanted - loaded):
            raise ValueError(f"the draft's model.safetensors lacks {', '.join(missing)}")
        return loaded
