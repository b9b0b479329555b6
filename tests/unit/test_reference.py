"""The reference decoder with a real (tiny, random) target in transformers: lossless, and equal to the offline walk.

Statistics of sampled output: three chi-square tests of level ALPHA on fixed seeds; with other random numbers at least one of them would
fail with probability below 3 * ALPHA = 0.03 %.
"""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtptrain.batches import Batch
from mtptrain.config import HeadConfig
from mtptrain.decoding import rejection
from mtptrain.decoding.compare import compare_drafts, compare_outputs
from mtptrain.decoding.reference import DraftSampling, Generation, Sampling, Top, greedy, speculate
from mtptrain.decoding.walk import draft_all_rows, hop
from mtptrain.heads.alignment import align
from mtptrain.heads.build import build_head, init_from_last_layer
from mtptrain.heads.drafter import bind
from mtptrain.heads.head import DraftHead, init_random
from mtptrain.heads.lm_head import LmHead, lm_head_of
from mtptrain.target.ends import TargetEnds, load_ends, load_last_layer
from tests.unit.distributions import chi_square
from tests.unit.tiny import tiny_llama

PROMPT = [1, 40, 41, 90, 17, 200, 33]
ALPHA = 1e-4


class Pair:
    """A target and a head that agrees with it now and then."""

    def __init__(self, folder: Path) -> None:
        self.folder = tiny_llama(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.model.get_decoder().norm.weight.data = torch.linspace(0.2, 1.8, 64)  # as training makes it: not all ones
        self.ends: TargetEnds = load_ends(self.folder, torch.float32, torch.device("cpu"))
        self.lm_head: LmHead = lm_head_of(self.ends.spec, self.ends.lm_head_VH)
        self.head: DraftHead = build_head(HeadConfig(), self.ends.spec)
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
            unroll = Unroll(bind(self.head, self.ends))
            unroll.extend(torch.tensor(tokens)[rows + 1], {"final": finals[rows]}, rows, torch.zeros_like(rows))
            loss = torch.nn.functional.cross_entropy(unroll.start(rows) @ self.lm_head.weight_VH.T, torch.tensor(tokens)[rows + 2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def speculate(self, prompt: list[int], max_tokens: int, stop_ids: set[int], k: int, sampling: Sampling | None = None) -> Generation:
        return speculate(self.model, bind(self.head, self.ends), self.lm_head, prompt, max_tokens, stop_ids, k, sampling)


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


@pytest.mark.parametrize("draft", DraftSampling)
def test_temperature_0_is_greedy_whatever_the_draft_sampling_and_the_stream(pair: Pair, draft: DraftSampling) -> None:
    assert pair.speculate(PROMPT, 40, set(), 3, Sampling(0.0, draft, random.Random(5))) == pair.speculate(PROMPT, 40, set(), 3)


@pytest.mark.parametrize("draft", DraftSampling)
def test_sampled_output_belongs_to_its_stream_and_stops_where_it_should(pair: Pair, draft: DraftSampling) -> None:
    def run(seed: int, max_tokens: int, stop_ids: set[int]) -> Generation:
        return pair.speculate(PROMPT, max_tokens, stop_ids, 3, Sampling(0.7, draft, random.Random(seed)))

    out = run(1, 40, set())
    assert out == run(1, 40, set()) != run(2, 40, set())
    assert len(out.tokens) == len(out.top) == 40
    stop = out.tokens[10]
    assert run(1, 40, {stop}).tokens == out.tokens[: out.tokens.index(stop) + 1]
    assert run(1, 7, set()).tokens == out.tokens[:7]
    at = 1
    for draft_ in out.drafts:
        emitted = out.tokens[at : at + draft_.accepted + 1]
        assert draft_.row == len(PROMPT) + at - 2
        assert len(draft_.tokens) == 3
        assert emitted[: draft_.accepted] == draft_.tokens[: draft_.accepted][: len(emitted)]
        at += len(emitted)
    assert at == 40


@pytest.mark.parametrize("k", [1, 3])
def test_reference_and_walk_draft_the_same_tokens_from_the_same_rows(pair: Pair, k: int) -> None:
    out = pair.speculate(PROMPT, 40, set(), k)
    tokens, span = PROMPT + out.tokens, (len(PROMPT), len(PROMPT) + 40)
    finals = pair.model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]
    stored = finals.to(torch.bfloat16).float()
    batch = Batch(documents=[0], token_T=torch.tensor(tokens), states={"final": stored}, rows=align(len(tokens), [span], k))
    rows = draft_all_rows(bind(pair.head, pair.ends), batch, k)
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
        batch = Batch(documents=[0], token_T=torch.tensor(tokens), states={"final": states.to(torch.bfloat16).float()}, rows=rows)
        drafts = draft_all_rows(bind(pair.head, pair.ends), batch, 3)
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


class SmallPair:
    """A target and an unrelated head with few tokens, so that all continuations can be enumerated."""

    VOCAB, PROMPT = 4, (1, 3, 0)

    def __init__(self, folder: Path) -> None:
        sizes = {"vocab_size": self.VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}
        folder = tiny_llama(folder, **sizes)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ends: TargetEnds = load_ends(folder, torch.float32, torch.device("cpu"))
        self.ends.lm_head_VH.mul_(3)
        self.model.get_output_embeddings().weight.data.mul_(3)
        self.head: DraftHead = build_head(HeadConfig(), self.ends.spec)
        init_random(self.head, 0.3, 0)

    @torch.no_grad()
    def exact(self, temperature: float) -> torch.Tensor:
        """p(a) p(b | a) p(c | a b), [V, V, V], from the target's own logits after each possible continuation."""
        v = self.VOCAB
        ids = [[*self.PROMPT, a, b] for a in range(v) for b in range(v)]
        p = (self.model(torch.tensor(ids)).logits.double() / temperature).softmax(-1).view(v, v, -1, v)
        n = len(self.PROMPT)
        return p[0, 0, n - 1][:, None, None] * p[:, 0, n][:, :, None] * p[:, :, n + 1]

    def chi_square(self, draft: DraftSampling, runs: int, temperature: float = 1.0) -> float:
        """p-value of the first three tokens of `runs` generations against `exact`."""
        sampling = Sampling(temperature, draft, random.Random(0))
        lm_head = lm_head_of(self.ends.spec, self.ends.lm_head_VH)
        counts = torch.zeros(self.VOCAB, self.VOCAB, self.VOCAB)
        for _ in range(runs):
            out = speculate(self.model, bind(self.head, self.ends), lm_head, list(self.PROMPT), 3, set(), 2, sampling)
            counts[tuple(out.tokens)] += 1
        return chi_square(counts, self.exact(temperature))


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> SmallPair:
    return SmallPair(tmp_path_factory.mktemp("target") / "small")


def accept_the_targets_argmax(draft_BK: torch.Tensor, _q_BKV: torch.Tensor, p_BKV: torch.Tensor) -> torch.Tensor:
    return (draft_BK == p_BKV.argmax(-1)).double()


def replace_from_p(_q_BV: torch.Tensor, p_BV: torch.Tensor) -> torch.Tensor:
    return p_BV


@pytest.mark.parametrize(
    ("draft", "temperature"), [(DraftSampling.greedy, 1.0), (DraftSampling.sampled, 1.0), (DraftSampling.sampled, 0.5)]
)
def test_sampled_output_has_the_targets_own_distribution(small_pair: SmallPair, draft: DraftSampling, temperature: float) -> None:
    assert small_pair.chi_square(draft, 700, temperature) > ALPHA


@pytest.mark.parametrize(
    ("draft", "part", "rule"),
    [
        (DraftSampling.greedy, "acceptance", accept_the_targets_argmax),
        (DraftSampling.sampled, "acceptance", accept_the_targets_argmax),
        (DraftSampling.greedy, "residual", replace_from_p),
    ],
)
def test_the_same_test_rejects_a_wrong_rule_with_fewer_runs(
    monkeypatch: pytest.MonkeyPatch, small_pair: SmallPair, draft: DraftSampling, part: str, rule: object
) -> None:
    monkeypatch.setattr(rejection, part, rule)
    assert small_pair.chi_square(draft, 200) < ALPHA
