"""Hidden states out of vLLM's own prefill, on any device and any number of tensor-parallel ranks.

vLLM mixes this class into its worker. States are whole on every rank (what a layer returns is already reduced), so rank 0 alone
keeps them and writes them. Eager mode only: a compiled graph runs no hooks.

Legend: T tokens of one step, H hidden size, N tokens of all documents written.
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mtptrain.engines.vllm_trace import given_id


class CaptureExtension:
    """Methods that `LLM.collective_rpc` calls on every worker."""

    model_runner: Any
    rank: int

    def mtptrain_begin(self, captures: list[str]) -> None:
        """Keep the states of every token computed from now on."""
        if self.rank == 0:
            self._mtptrain = Recorder(self.model_runner, captures)

    def mtptrain_write(self, ids: list[str], path: str) -> None:
        """Write the states of finished requests, one after the other: bf16 [N, H] a capture. They are forgotten."""
        if self.rank == 0:
            self._mtptrain.write(ids, path)


class Recorder:
    """States by request, in the order of their tokens."""

    def __init__(self, runner: Any, captures: list[str]) -> None:
        self._runner, self._captures = runner, captures
        self._step: dict[str, Tensor] = {}
        self._parts: dict[str, list[tuple[int, dict[str, Tensor]]]] = {}
        layers = decoder_layers(runner.get_model())
        for capture in captures:
            if capture != "final":
                layers[int(capture.removeprefix("after_"))].register_forward_hook(self._hook(capture))
        self._sample = runner.sample_tokens
        runner.sample_tokens = self._before_sampling

    def _hook(self, capture: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # vLLM's layers return (what is to be added, residual stream); the stream after the layer is their sum
            self._step[capture] = output[0] + output[1] if isinstance(output, tuple) and output[1] is not None else _first(output)

        return keep

    def _before_sampling(self, *args: Any, **kwargs: Any) -> Any:
        if (state := self._runner.execute_model_state) is not None:
            self._keep(state.scheduler_output.num_scheduled_tokens, state.hidden_states)
        return self._sample(*args, **kwargs)

    def _keep(self, counts: dict[str, int], final_TH: Tensor) -> None:
        self._step["final"] = final_TH
        total = sum(counts.values())
        states = {c: self._step[c][:total].to(device="cpu", dtype=torch.bfloat16) for c in self._captures}
        begin = 0
        for name in self._runner.input_batch.req_ids:
            if count := counts.get(name, 0):
                rows = {c: s[begin : begin + count].clone() for c, s in states.items()}
                request = self._runner.requests[name]
                self._parts.setdefault(given_id(name), []).append((request.num_computed_tokens, rows))
                begin += count
        assert begin == total, f"{total} tokens were scheduled, {begin} belong to known requests"

    def write(self, ids: list[str], path: str) -> None:
        whole: dict[str, list[Tensor]] = {c: [] for c in self._captures}
        for name in ids:
            at = 0
            for start, rows in sorted(self._parts.pop(name), key=lambda part: part[0]):
                assert start == at, f"request {name}: states of tokens {at}..{start - 1} were not computed"
                at += len(next(iter(rows.values())))
                for c, s in rows.items():
                    whole[c].append(s)
        save_file({c: torch.cat(parts) for c, parts in whole.items()}, path + ".tmp")
        os.replace(path + ".tmp", path)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The target's decoder layers, wherever its class keeps them."""
    language = getattr(model, "get_language_model", lambda: model)()
    for name in ("model.layers", "language_model.model.layers", "transformer.h"):
        try:
            layers = language.get_submodule(name)
        except AttributeError:
            continue
        assert isinstance(layers, nn.ModuleList)
        return layers
    raise RuntimeError(f"{type(model).__name__}: its decoder layers were not found, so only `final` can be captured")


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
