"""Every drafted token of a real vLLM against the reference head, on targets of several architectures and both layouts.

float32 on both sides, so nothing but a wrong convention separates them: equality is exact, not up to ties.
"""

from pathlib import Path
from typing import Any

import pytest

from mtptrain.config import Config, HeadConfig, HeadKind, OutputProjection, VllmLayout
from mtptrain.engines.process import require_engine
from mtptrain.exporters.vllm import from_vllm, pick_layout, to_vllm
from mtptrain.stages.engine_trial import NONE, certify, draft_of, run_trials
from mtptrain.stages.walk import walk_documents
from tests.engine.case import make_case

pytestmark = pytest.mark.engine

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
STOCK, PLUGIN, SPECULATORS = VllmLayout.stock, VllmLayout.plugin, VllmLayout.speculators
_EAGLE3 = HeadKind.eagle3
CASES: dict[str, tuple[str, dict[str, Any], HeadConfig, list[VllmLayout]]] = {
    "llama, untied, llama3 RoPE": (
        "llama",
        {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 64}},
        HeadConfig(),
        [STOCK, PLUGIN],
    ),
    "llama, tied, yarn RoPE": ("llama", {"tie_word_embeddings": True, "rope_parameters": _YARN}, HeadConfig(), [STOCK, PLUGIN]),
    "mistral, sliding window": ("mistral", {"sliding_window": 24}, HeadConfig(), [PLUGIN]),
    "qwen2, biases": ("qwen2", {}, HeadConfig(), [PLUGIN]),
    "qwen2, a head without biases": ("qwen2", {"tie_word_embeddings": True}, HeadConfig(attention_bias=False), [STOCK]),
    "qwen3, q and k norms": ("qwen3", {}, HeadConfig(), [PLUGIN]),
    "gemma3, scaled embeddings": (
        "gemma3_text",
        {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        HeadConfig(),
        [PLUGIN],
    ),
    "eagle, untied, llama3 RoPE": (
        "llama",
        {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 64}},
        HeadConfig(kind=HeadKind.eagle),
        [STOCK],
    ),
    "eagle3, reduced vocabulary, tied, yarn RoPE": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": _YARN},
        HeadConfig(kind=_EAGLE3, draft_vocabulary=120),
        [STOCK, SPECULATORS],
    ),
    "eagle3, every norm but those of 3.1, the target's rows, two streams": (
        "qwen3",
        {"num_hidden_layers": 5},
        HeadConfig(
            kind=_EAGLE3,
            aux_captures=["after_1", "after_3"],
            draft_vocabulary=120,
            lm_head=OutputProjection.target,
            norm_before_residual=True,
            norm_before_fc=True,
        ),
        [STOCK, SPECULATORS],
    ),
    "eagle3.1, the target's lm_head, four streams": (
        "mistral",
        {"num_hidden_layers": 5, "sliding_window": 24},
        HeadConfig(
            kind=_EAGLE3,
            aux_captures=["after_0", "after_1", "after_3", "after_4"],
            lm_head=OutputProjection.target,
            fc_norm=True,
            norm_output=True,
        ),
        [STOCK],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_drafts_what_the_reference_drafts(tmp_path: Path, name: str) -> None:
    model_type, shape, head_config, layouts = CASES[name]
    case = make_case(tmp_path, model_type, head_config, **shape)
    engine = require_engine(Config(), "this test")
    drafts: dict[str, dict[str, Any] | None] = {NONE: None}
    for layout in layouts:
        folder = tmp_path / layout.name
        folder.mkdir()
        drafter = case.context.bind(case.head)
        to_vllm(case.head, case.context.spec, layout, rows_DH=drafter.lm_head.weight_VH, target=case.cfg.target.path).write(folder)
        case.head.load_state_dict(from_vllm(folder, case.head))
        drafts[layout.name] = draft_of(folder, case.cfg.head.kind)
    assert pick_layout(VllmLayout.auto, case.head.config, case.context.spec) is layouts[0]
    runs = run_trials(case.cfg, case.context, engine, drafts, case.store, case.documents)
    walks, _ = walk_documents(case.head, case.context, case.store, case.documents, [case.cfg.validate.k])
    for layout in layouts:
        found = certify(case.cfg, case.context, case.head, case.store, case.documents, runs[NONE], runs[layout.name])
        assert found.differing == []
        assert found.drafts.raw == found.outputs.raw == found.target.raw == 1.0
        accepted = sum(draft.accepted for walk in found.engine for draft in walk.drafts)
        rejected = sum(len(draft.tokens) - draft.accepted for walk in found.engine for draft in walk.drafts)
        assert accepted >= 50, f"{accepted} accepted: too few to prove anything"
        assert rejected >= 50, f"{rejected} rejected: too few to prove anything"
        assert found.engine == found.reference
        stored = sum(draft.accepted for walk in walks[case.cfg.validate.k] for draft in walk.drafts)
        assert abs(stored - accepted) <= 0.03 * accepted  # the store rounds states to bfloat16, this engine does not
        assert runs[layout.name].altered == 0
        assert runs[layout.name].counters["drafts"] == sum(len(walk.drafts) for walk in found.engine)
