"""The target's own forward in transformers, and its hidden states at named capture points.

Legend: T packed tokens of all documents, H hidden size.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtptrain.config import Device, Dtype
from mtptrain.errors import UserError
from mtptrain.target.packed_attention import PACKED
from mtptrain.target.packed_linear import can_pack, pack_linears
from mtptrain.target.quantized_linear import serve_quantized
from mtptrain.target.spec import read_config, read_spec

_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Their frequencies depend on the longest position of a forward, so documents that share one would change each other."""


def pick_device(device: Device) -> torch.device:
    """The device asked for; `auto` takes CUDA where it is usable."""
    if device is Device.cuda and not torch.cuda.is_available():
        raise UserError("device=cuda: this PyTorch sees no CUDA device; use device=cpu or install a CUDA build")
    use_cuda = device is Device.cuda or (device is Device.auto and torch.cuda.is_available())
    return torch.device("cuda" if use_cuda else "cpu")


def pick_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The compute dtype asked for; `auto` is bfloat16 where the machine multiplies it natively, else float32."""
    if dtype is not Dtype.auto:
        return torch.bfloat16 if dtype is Dtype.bfloat16 else torch.float32
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def set_threads(count: int) -> None:
    """CPU threads of torch; 0 leaves its own choice (all cores)."""
    if count:
        torch.set_num_threads(count)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    """The whole target in evaluation mode, frozen, with sdpa attention (eager where it soft-caps its scores, which sdpa can't).

    In float32 on a CPU its linear layers are packed for oneDNN, so they hold no `weight` any more.
    """
    quantized = is_quantized(folder)
    attention = "eager" if read_spec(folder).attention_softcap else "sdpa"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except RuntimeError as e:
        if "mismatched" not in str(e):
            raise
        raise UserError(f"{folder}: the weights do not have the shapes that config.json names; the checkpoint and its config differ") from e
    model = model.eval().requires_grad_(False)
    if quantized:
        serve_quantized(model)
    torch.nn.Module.to(model, device)
    if can_pack(model):
        pack_linears(model)
    return model


def is_quantized(folder: Path) -> bool:
    """Whether the target is a compressed-tensors checkpoint. UserError where transformers lacks what reads it."""
    quantized = read_config(folder).get("quantization_config")
    if not quantized or quantized.get("quant_method") != "compressed-tensors":
        return False
    if importlib.util.find_spec("compressed_tensors") is None:
        raise UserError(f"{folder} is quantised by compressed-tensors, which is not installed; pip install 'mtptrain[quantized]'")
    return True


@torch.no_grad()
def capture_packed(model: PreTrainedModel, tokens: list[list[int]], names: list[str]) -> dict[str, Tensor]:
    """Hidden states [T, H] at each capture point of `names`, for all documents of `tokens` one after the other.

    One forward of the concatenated documents: no padding, positions restart, no attention across documents; equal to one
    forward a document. `final` is the stream after the target's final norm, `after_<i>` after decoder layer i (so that
    `final` = norm(`after_<L-1>`)). In the model's dtype, on its device. UserError for a layer the target lacks.
    """
    if len(tokens) > 1 and _rope_depends_on_length(model):
        parts = [capture_packed(model, [document], names) for document in tokens]
        return {name: torch.cat([part[name] for part in parts]) for name in names}
    decoder = model.get_decoder()
    lengths = [len(document) for document in tokens]
    ids_1T = torch.tensor([[token for document in tokens for token in document]], device=model.device)
    position_1T = torch.cat([torch.arange(length) for length in lengths])[None].to(model.device)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    with _packed(model), hooked(layer_modules(model, names)) as states:
        output = decoder(input_ids=ids_1T, position_ids=position_1T, use_cache=False, cu_seq_lens_q=bounds)
    states["final"] = output.last_hidden_state
    return {name: states[name][0] for name in names}


def layer_modules(model: PreTrainedModel, names: Sequence[str]) -> dict[str, nn.Module]:
    """The decoder layer whose output each capture is; `final` has none."""
    layers = model.get_decoder().layers
    return {name: layers[_layer_index(name, len(layers))] for name in names if name != "final"}


def _layer_index(name: str, num_layers: int) -> int:
    index = int(name.removeprefix("after_"))
    if index >= num_layers:
        raise UserError(f"precompute.captures: {name} asks for a layer the target lacks; its last is after_{num_layers - 1}")
    return index


def _rope_depends_on_length(model: PreTrainedModel) -> bool:
    rope = model.config.get_text_config().rope_parameters
    entries = rope.values() if all(isinstance(entry, dict) for entry in rope.values()) else [rope]
    return any(entry["rope_type"] in _LENGTH_DEPENDENT_ROPE for entry in entries)


@contextmanager
def _packed(model: PreTrainedModel) -> Iterator[None]:
    """Let every layer attend by `packed_attention`; transformers builds no mask for an attention it does not know."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def hooked(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The outputs of `modules` in the forward run inside, by name."""
    states: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        states[name] = output if isinstance(output, Tensor) else output[0]

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in modules.items()]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
