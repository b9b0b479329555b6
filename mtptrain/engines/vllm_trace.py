"""What vLLM's scheduler saw of each request: what was drafted, from which row, and how much of it was accepted.

The drafter's proposals are read where the engine takes them from it, verified drafts where the scheduler commits the result.
"""

from collections import defaultdict
from typing import Any

_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def given_id(name: str) -> str:
    """The id a request was added with: vLLM appends a dash and random characters."""
    return name.rpartition("-")[0]


class Trace:
    """Hooks one engine's scheduler. A step of a request is [row, drafted ids, accepted], in order.

    row: position p whose target state and next token (p+1) the draft started from; the first drafted id stands at p+2. A decode step
    without a draft has no ids. The step that ends the prefill is not one of them: it verifies nothing.
    """

    def __init__(self, engine: Any) -> None:
        self.altered = 0
        """Drafts that were scheduled otherwise than the drafter proposed them (a shortened one is not)."""
        self._steps: dict[str, list[list[Any]]] = defaultdict(list)
        self._proposed: dict[str, list[int]] = {}
        scheduler = engine.engine_core.engine_core.scheduler
        self._scheduler = scheduler
        self._update, self._propose = scheduler.update_from_output, scheduler.update_draft_token_ids
        scheduler.update_from_output = self._on_update
        scheduler.update_draft_token_ids = self._on_propose

    def take(self, request_id: str) -> list[list[Any]]:
        return self._steps.pop(request_id, [])

    def _on_propose(self, drafts: Any) -> Any:
        for name, ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self._proposed[name] = list(ids)
        return self._propose(drafts)

    def _on_update(self, scheduled: Any, ran: Any) -> Any:
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self._scheduler.requests.get(name)
            sampled = ran.sampled_token_ids[ran.req_id_to_index[name]] if ran.sampled_token_ids else []
            if request is None or request.is_finished() or not sampled:
                continue
            first = request.num_computed_tokens - count  # scheduling has already counted this step's tokens
            if first < request.num_prompt_tokens:
                continue
            drafted = list(scheduled.scheduled_spec_decode_tokens.get(name, []))
            if drafted != self._proposed.get(name, [])[: len(drafted)]:
                self.altered += 1
            self._steps[given_id(name)].append([first - 1, drafted, max(len(sampled) - 1, 0)])
        return self._update(scheduled, ran)


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own counters of speculative decoding, by our names; {} where it has none."""
    return {
        _COUNTERS[m.name]: [int(v) for v in m.values] if hasattr(m, "values") else int(m.value)
        for m in llm.get_metrics()
        if m.name in _COUNTERS
    }
