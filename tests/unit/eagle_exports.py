"""A small eagle head written for an engine, and what the head itself drafts: for the tests of the exporters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtptrain.config import Engine
from mtptrain.exporters.engines import to_engine
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.unroll import Unroll, rows_of
from mtptrain.target.spec import TargetSpec
from tests.unit.heads import HIDDEN, small_batch, small_spec

LAYERS, LENGTH, STEPS = 8, 9, 3
SPEC = small_spec(num_layers=LAYERS)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_SPEC = small_spec(num_layers=LAYERS, head_dim=8, rope=LLAMA3 | {"original_max_position_embeddings": 64})
"""Its four frequencies: one stays, two are blended, one is stretched."""
IDS = torch.tensor([1, 2, 3, 7, 8, 11, 12, 13, 17, 20, 21, 25, 30])
Steps = list[tuple[Tensor, Tensor]]


def tokens_and_states() -> tuple[Tensor, dict[str, Tensor]]:
    """One document and every state of the target at it."""
    batch = small_batch([LENGTH], [[(2, LENGTH)]], 1, captures=("final", *(f"after_{i}" for i in range(LAYERS))))
    return batch.token_T, batch.states


def entering(states: dict[str, Tensor]) -> dict[int, Tensor]:
    """The streams [P, H] that enter layers 0..N, at the rows that have a next token; `after_i` enters layer i+1."""
    streams = {0: torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(5))}
    streams |= {i + 1: states[f"after_{i}"] for i in range(LAYERS)}
    return {i: stream[:-1] for i, stream in streams.items()}


def written(folder: Path, engine: Engine, drafter: Drafter, spec: TargetSpec = SPEC, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True)
    to_engine(engine, drafter, spec, dtype).write(folder)
    return folder


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """The folder with another config.json."""
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def own_steps(drafter: Drafter, token_T: Tensor, states: dict[str, Tensor], steps: int = STEPS) -> Steps:
    """State [P, H] and drafted token [P] of every row, a pair a step; a later step embeds what the one before drafted."""
    rows = torch.arange(len(token_T) - 1)
    unroll = Unroll(drafter)
    unroll.extend(token_T[1:], rows_of(states, rows), rows, torch.zeros_like(rows))
    state = unroll.start(rows).detach()
    found = [(state, drafter.choices(state))]
    for _ in range(1, steps):
        state = unroll.advance(rows, found[-1][1]).detach()
        found.append((state, drafter.choices(state)))
    return found


def agree(ours: Steps, theirs: Steps) -> None:
    """The same tokens at every step; states within float32 rounding, of which each step adds its own."""
    assert len(ours) == len(theirs) == STEPS
    for (state, token), (their_state, their_token) in zip(ours, theirs, strict=True):
        assert torch.equal(token, their_token)
        torch.testing.assert_close(state.double(), their_state, rtol=5e-5, atol=5e-5)


def gaps(ours: Steps, theirs: Steps) -> list[float]:
    """The largest difference between the states of each step."""
    return [float((state.double() - their_state).abs().max()) for (state, _), (their_state, _) in zip(ours, theirs, strict=True)]
