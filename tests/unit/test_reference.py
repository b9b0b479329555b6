"""The reference decoder with a real (tiny, random) target in transformers: lossless, and equal to the offline walk."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtptrain.batches import Batch
from mtptrain.config import HeadConfig
from mtptrain.decoding.compare import compare_drafts, compare_outputs
from mtptrain.decoding.reference import Generation, Top, greedy, speculate
from mtptrain.decoding.walk import draft_all_rows, hop
from mtptrain.heads.alignment import align
from mtptrain.heads.mtp import MtpHead, build_head, init_from_last_layer, init_random
from mtptrain.losses import LmHead, lm_head_of
from mtptrain.target.ends import TargetEnds, load_ends, load_last_layer
from tests.unit.tiny import tiny_llama

PROMPT = [1, 40, 41, 90, 17, 200, 33]


class Pair:
    """A target and a head that agrees with it now and then."""

    def __init__(self, folder: Path) -> None:
        self.folder = tiny_llama(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.model.get_decoder().norm.weight.data = torch.linspace(0.2, 1.8, 64)  # as training makes it: not all ones
        self.ends: TargetEnds = load_ends(self.folder, torch.float32, torch.device("cpu"))
        self.lm_head: LmHead = lm_head_of(self.ends.spec, self.ends.lm_head_VH)
        self.head: MtpHead = build_head(HeadConfig(), self.ends.spec)
        init_random(self.head, 0.02, 0)
        init_from_last_layer(self.head, self.ends.spec, load_last_layer(self.folder), self.ends.final_norm_H)
        self.overfit(40)

    def overfit(self, updates: int) -> None:
        """Fit the head to the target's own answer on the prompt, so that drafts are accepted (and, elsewhere, refused)."""
        tokens = PROMPT + greedy(self.model, self.lm_head, PROMPT, 40, set()).tokens
        finals = self.model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0].detach()
        from mtptrain.heads.unroll import Unroll

        rows = torch.arange(len(tokens) - 2)
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=1e-2)
        for _ in range(updates):
            unroll = Unroll(self.head, self.ends.embed_VH, 1.0)
            unroll.extend(torch.tensor(tokens)[rows + 1], finals[rows], rows, torch.zeros_like(rows))
            loss = torch.nn.functional.cross_entropy(self.lm_head.logits(unroll.start(rows)), torch.tensor(tokens)[rows + 2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def speculate(self, prompt: list[int], max_tokens: int, stop_ids: set[int], k: int) -> Generation:
        return speculate(self.model, self.head, self.ends.embed_VH, 1.0, self.lm_head, prompt, max_tokens, stop_ids, k)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("target") / "tiny")


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("prompt", [PROMPT, [5, 6], [1, 2, 3, 4, 250, 251, 9, 9, 9, 9]])
def test_output_is_the_targets_own_greedy_output(pair: Pair, k: int, prompt: list[int]) -> None:
    own = pair.model.generate(
        torch.tensor([prompt]), max_new_tokens=50, min_new_tokens=50, do_sample=False, attention_mask=torch.ones(1, len(prompt))
    )[0, len(prompt) :].tolist()
    assert greedy(pair.model, pair.lm_head, prompt, 50, set()).tokens[:20] == own[:20]
    out = pair.speculate(prompt, 50, set(), k)
    assert out.tokens == greedy(pair.model, pair.lm_head, prompt, 50, set()).tokens
    assert len(out.drafts) + sum(d.accepted for d in out.drafts) >= 49


def test_drafts_are_accepted_and_refused(pair: Pair) -> None:
    """Else the equality above would say little."""
    drafts = [d for prompt in (PROMPT, [5, 6]) for d in pair.speculate(prompt, 60, set(), 3).drafts]
    assert sum(d.accepted for d in drafts) >= 20
    assert sum(d.accepted < 3 for d in drafts) >= 10


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_output_stops_at_max_tokens(pair: Pair, max_tokens: int) -> None:
    assert pair.speculate(PROMPT, max_tokens, set(), 3).tokens == greedy(pair.model, pair.lm_head, PROMPT, max_tokens, set()).tokens


def test_output_stops_at_the_first_stop_id_even_inside_an_accepted_draft(pair: Pair) -> None:
    own = greedy(pair.model, pair.lm_head, PROMPT, 40, set()).tokens
    for stop in dict.fromkeys(own):
        expected = own[: own.index(stop) + 1]
        assert pair.speculate(PROMPT, 40, {stop}, 3).tokens == expected


@pytest.mark.parametrize("k", [1, 3])
def test_reference_and_walk_draft_the_same_tokens_from_the_same_rows(pair: Pair, k: int) -> None:
    out = pair.speculate(PROMPT, 40, set(), k)
    tokens, span = PROMPT + out.tokens, (len(PROMPT), len(PROMPT) + 40)
    finals = pair.model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]
    stored = finals.to(torch.bfloat16).float()
    batch = Batch(documents=[0], token_T=torch.tensor(tokens), final_TH=stored, rows=align(len(tokens), [span], k))
    rows = draft_all_rows(pair.head, batch, pair.ends.embed_VH, 1.0, pair.lm_head, k, 64)
    (walk,) = hop(rows, batch, [[span]], [("a", "s")], k)
    room = [span[1] - (d.row + 2) for d in out.drafts]
    reference = [(d.row, d.tokens[: min(d.accepted + 1, k, r)], min(d.accepted, r)) for d, r in zip(out.drafts, room, strict=True) if r > 0]
    assert reference == [(d.row, d.tokens, d.accepted) for d in walk.drafts]
    by_row = dict(zip(rows.row_R.tolist(), rows.tokens_R, strict=True))
    agreement = compare_drafts(out, by_row, len(tokens))
    assert agreement.compared == agreement.equal >= 40 / (k + 1)


def test_fault_02_a_head_fed_pre_norm_states_is_caught(pair: Pair) -> None:
    """Drafting from the stream before the final norm disagrees with the reference decoder (on a prompt the head has not seen)."""
    prompt = [5, 6, 77]
    out = pair.speculate(prompt, 60, set(), 3)
    tokens = prompt + out.tokens
    pre_norm: list[torch.Tensor] = []
    handle = pair.model.get_decoder().norm.register_forward_pre_hook(lambda _m, args: pre_norm.append(args[0][0]))
    post_norm = pair.model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]
    handle.remove()

    def agreement(states: torch.Tensor) -> float:
        rows = align(len(tokens), [(len(prompt), len(tokens))], 3)
        batch = Batch(documents=[0], token_T=torch.tensor(tokens), final_TH=states.to(torch.bfloat16).float(), rows=rows)
        drafts = draft_all_rows(pair.head, batch, pair.ends.embed_VH, 1.0, pair.lm_head, 3, 64)
        return compare_drafts(out, dict(zip(drafts.row_R.tolist(), drafts.tokens_R, strict=True)), len(tokens)).agreement

    assert agreement(post_norm) == 1.0
    assert agreement(pre_norm[0]) < 0.9


def test_a_tie_is_two_units_of_bfloat16() -> None:
    top = Top([7, 8, 9], [16.0, 15.75, 15.7])  # a unit at 16 is 16 * 2^-7 = 0.125
    assert [top.ties_with(t) for t in (7, 8, 9, 5)] == [True, True, False, False]


def test_outputs_are_compared_to_the_first_difference() -> None:
    tops = [Top([1, 2], [4.0, 1.0]), Top([2, 3], [4.0, 3.99]), Top([5, 6], [4.0, 1.0])]
    out = Generation(tokens=[1, 2, 5], top=tops, drafts=[], draft_top=[])
    agreement, common = compare_outputs(out, [1, 3, 9])
    assert (agreement.equal, agreement.ties, agreement.compared, common) == (1, 1, 2, 1)
    agreement, common = compare_outputs(out, [1, 2])
    assert (agreement.equal, agreement.ties, agreement.compared, common) == (2, 0, 3, 2)
