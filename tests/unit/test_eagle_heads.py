"""EAGLE-1 and EAGLE-3 heads, their unrolled steps and their training, against the float64 re-derivation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtptrain.config import Config, HeadConfig, HeadInit, HeadKind, LossConfig, OutputProjection, TrainConfig
from mtptrain.decoding.expected import acceptance_of_rows
from mtptrain.decoding.walk import draft_all_rows, hop
from mtptrain.errors import UserError
from mtptrain.heads.build import build_head, head_from_record, head_record, init_from_last_layer, init_lm_head
from mtptrain.heads.captures import captures_of, default_captures
from mtptrain.heads.head import DraftHead
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.unroll import Unroll, true_token_steps
from mtptrain.store.reader import Store
from mtptrain.trainer import Trainer
from tests.unit.heads import EPS, HIDDEN, THETA, VOCAB, bound, small_batch, small_embed, small_head, small_spec
from tests.unit.rederive import Eagle3_64, Eagle64, Layer64
from tests.unit.stores import make_store, random_documents, random_state
from tests.unit.test_walk import sequential

AUX = ["after_0", "after_2", "after_3"]
SPEC = small_spec(num_layers=5)
IDS = torch.tensor([1, 2, 3, 7, 8, 11, 12, 13, 17, 20, 21, 25, 30])
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": HeadKind.eagle},
    "eagle, fc bias": {"kind": HeadKind.eagle, "fc_bias": True},
    "eagle3": {"kind": HeadKind.eagle3},
    "eagle3, four streams": {"kind": HeadKind.eagle3, "aux_captures": ["after_0", "after_1", "after_2", "after_4"]},
    "eagle3, norm before residual": {"kind": HeadKind.eagle3, "norm_before_residual": True},
    "eagle3, norm before fc": {"kind": HeadKind.eagle3, "norm_before_fc": True},
    "eagle3.1": {"kind": HeadKind.eagle3, "fc_norm": True, "norm_output": True},
    "eagle3, every option": {
        "kind": HeadKind.eagle3,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
    },
    "eagle3, a key/value head a query head": {"kind": HeadKind.eagle3, "num_kv_heads": 0, "fc_norm": True},
    "eagle3, reduced vocabulary": {"kind": HeadKind.eagle3, "draft_ids": IDS},
    "eagle3, the target's rows": {"kind": HeadKind.eagle3, "draft_ids": IDS, "lm_head": OutputProjection.target},
}


def made(name: str, std: float = 0.3) -> DraftHead:
    options = dict(HEADS[name])
    if options["kind"] is HeadKind.eagle3:
        options.setdefault("aux_captures", AUX)
    head: DraftHead = small_head(SPEC, std=std, **options)
    return head


def rederived(head: DraftHead) -> Layer64:
    kv_heads = len(head.layer.self_attn.k_proj.weight) // 4
    sizes = {"heads": 4, "kv_heads": kv_heads, "head_dim": 4, "eps": EPS, "theta": THETA}
    weights = {n: t for n, t in head.state_dict().items() if t.is_floating_point()}
    if head.captures == ("final",):
        return Eagle64(weights, **sizes)  # type: ignore[arg-type]
    c = head.config
    return Eagle3_64(weights, norm_before_residual=c.norm_before_residual, norm_output=c.norm_output, **sizes)


def first_hidden(independent: Layer64, head: DraftHead, states: dict[str, Tensor], rows: slice) -> Tensor:
    """The hidden state of step 0 at each row of a document, float64."""
    if isinstance(independent, Eagle3_64):
        streams = [states[name][rows] for name in head.captures]
        return torch.stack([independent.fuse([s[i] for s in streams]) for i in range(len(streams[0]))])
    return states["final"][rows].double()


@pytest.mark.parametrize("name", HEADS)
def test_unrolled_steps_equal_the_rederivation(name: str) -> None:
    """Two packed documents, four steps, every valid row: float64 from the formulas, within float32 rounding."""
    head, embed, lengths, steps = made(name), small_embed(), [9, 6], 4
    batch = small_batch(lengths, [[(2, 9)], [(1, 6)]], steps, captures=("final", *head.captures))
    unroll = Unroll(bound(head), documents=2)
    found = list(true_token_steps(unroll, batch.rows, batch.token_T, batch.states, steps))
    independent, compared = rederived(head), 0
    hidden = {first: first_hidden(independent, head, batch.states, slice(first, first + n)) for first, n in ((0, 9), (9, 6))}
    for k, (alive, state) in enumerate(found):
        for row, y in zip(alive.tolist(), state, strict=True):
            first, length = (0, 9) if row < 8 else (9, 6)
            tokens = batch.token_T[first : first + length].tolist()
            expected = independent.draft_states(embed, tokens, hidden[first], int(batch.rows.position_R[row]), k + 1)[k]
            torch.testing.assert_close(y.double(), expected, rtol=3e-5, atol=3e-5)
            compared += 1
    assert compared == (6 + 5 + 4 + 3) + (4 + 3 + 2 + 1)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1", "eagle3, reduced vocabulary", "eagle3, the target's rows"])
def test_the_walk_equals_its_sequential_definition(name: str) -> None:
    """Greedy chains, drafted ids mapped to the target's; the continuation is often what the head drafts."""
    head, embed, k = made(name), small_embed(), 3
    independent = rederived(head)
    length, spans = 20, [(3, 12), (13, 20)]
    batch = small_batch([length], [spans], k, captures=("final", *head.captures))
    hidden = first_hidden(independent, head, batch.states, slice(0, length))
    ids = range(VOCAB) if head.draft_ids is None else head.draft_ids.tolist()
    weight = embed if head.lm_head is None else head.lm_head.weight.detach()
    rows = weight.double() if head.lm_head is not None else embed[list(ids)].double()

    def choice(state: Tensor) -> int:
        return list(ids)[int((rows @ state).argmax())]

    generator = torch.Generator().manual_seed(3)
    for start, end in spans:
        p = start - 1
        while p + 2 < end:
            drafted: list[int] = []
            while len(drafted) < k and p + 2 + len(drafted) < end and float(torch.rand((), generator=generator)) < 0.75:
                state = independent.draft_states(embed, batch.token_T.tolist(), hidden, p, len(drafted) + 1, drafted)[-1]
                drafted.append(choice(state))
                batch.token_T[p + 1 + len(drafted)] = drafted[-1]
            p += len(drafted) + 1
    found = draft_all_rows(bound(head), batch, k)
    (walk,) = hop(found, batch, [spans], [("a", "s")], k)
    tokens = batch.token_T.tolist()
    expected = [d for span in spans for d in sequential(independent, embed, tokens, hidden, span, k, choice)]
    assert [(d.row, d.tokens, d.accepted) for d in walk.drafts] == expected
    assert max(found.accepted_R) >= 2


def test_fault_05_drafted_ids_are_the_targets() -> None:
    """Rows of the reduced projection are not token ids: without the map other tokens come out."""
    head = made("eagle3, reduced vocabulary")
    state = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(1))
    choices = bound(head).choices(state)
    assert set(choices.tolist()) <= set(IDS.tolist())
    assert len(set(choices.tolist())) > 5
    row = bound(head).lm_head.logits(state).argmax(-1)
    assert torch.equal(choices, IDS[row])
    assert not torch.equal(choices, row)
    whole = bound(head).whole_logits(state)
    assert torch.equal(whole.argmax(-1), choices)
    assert whole.isinf().sum() == 200 * (VOCAB - len(IDS))


def test_expected_acceptance_over_a_reduced_vocabulary() -> None:
    """q is 0 outside: sum min(p, q) counts the ids of the draft vocabulary alone, p over the whole one."""
    head, embed = made("eagle3, reduced vocabulary"), small_embed()
    generator = torch.Generator().manual_seed(5)
    state, teacher = torch.randn(30, HIDDEN, generator=generator), torch.randn(30, HIDDEN, generator=generator)
    greedy, sampled = acceptance_of_rows(state, torch.arange(30), teacher, LmHead(embed), bound(head).lm_head, 7)
    assert head.lm_head is not None
    q = torch.zeros(30, VOCAB, dtype=torch.float64)
    q[:, IDS] = (state.double() @ head.lm_head.weight.detach().double().T).softmax(-1)
    p = (teacher.double() @ embed.double().T).softmax(-1)
    torch.testing.assert_close(sampled.double(), torch.minimum(p, q).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(greedy.double(), p.gather(1, q.argmax(-1, keepdim=True))[:, 0], rtol=1e-5, atol=1e-7)


def test_default_streams_are_those_entering_layers_2_half_and_3_before_the_end() -> None:
    assert default_captures(30) == ["after_1", "after_14", "after_26"]
    assert default_captures(7) == ["after_1", "after_2", "after_3"]
    assert default_captures(3) == ["after_0", "after_1", "after_2"]
    assert default_captures(2) == ["after_0", "after_1"]
    assert captures_of(HeadConfig(kind=HeadKind.eagle3), small_spec(num_layers=32)) == ["final", "after_1", "after_15", "after_28"]
    with pytest.raises(UserError, match=r"head\.aux_captures=after_9: the target's last layer is after_4"):
        captures_of(HeadConfig(kind=HeadKind.eagle3, aux_captures=["after_1", "after_9"]), SPEC)


@pytest.mark.parametrize("name", HEADS)
def test_a_record_and_the_state_rebuild_the_head(name: str) -> None:
    head = made(name)
    again = head_from_record(head_record(head))
    again.load_state_dict(head.state_dict())
    assert again.config == head.config
    assert again.captures == head.captures
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)


def test_own_projection_starts_as_the_targets_rows() -> None:
    head, lm_head = made("eagle3, reduced vocabulary"), small_embed(7)
    init_lm_head(head, lm_head)
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, lm_head[IDS])


def test_last_layer_initialisation_fits_an_eagle_layer_and_no_eagle3_layer() -> None:
    source = small_head(small_spec(), seed=5)
    layer = {n: p.detach() for n, p in source.layer.named_parameters()}
    head = made("eagle")
    init_from_last_layer(head, SPEC, layer, torch.ones(HIDDEN))
    assert torch.equal(head.layer.self_attn.q_proj.weight, source.layer.self_attn.q_proj.weight)
    with pytest.raises(UserError, match="read two states"):
        init_from_last_layer(made("eagle3"), SPEC, layer, torch.ones(HIDDEN))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": HeadKind.eagle, "fc_norm": True}, r"head\.fc_norm=True: head\.kind=eagle has none"),
        ({"kind": HeadKind.eagle3, "fc_bias": True}, r"head\.fc_bias=True: head\.kind=eagle3 has none"),
        ({"kind": HeadKind.eagle3, "qk_norm": True}, r"head\.qk_norm=True: head\.kind=eagle3 has none"),
        ({"draft_vocabulary": 100}, r"head\.draft_vocabulary=100: head\.kind=mtp has none"),
        ({"num_kv_heads": 0}, r"head\.num_kv_heads=0: head\.kind=mtp has none"),
        ({"kind": HeadKind.eagle3, "num_kv_heads": -1}, r"head\.num_kv_heads=-1: must be >= 0"),
        ({"init": HeadInit.least_squares, "checkpoint": "x"}, r"head\.init=least_squares: head\.checkpoint says what training starts from"),
        ({"kind": HeadKind.eagle3, "aux_captures": ["after_2", "after_1"]}, r"head\.aux_captures=.*must ascend"),
        ({"kind": HeadKind.eagle3, "aux_captures": ["final"]}, r"head\.aux_captures=final: is not `after_<layer>`"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HeadConfig(**options)


def test_a_feature_loss_on_an_eagle3_head_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.loss\.hidden_weight=0\.5: an eagle3"):
        Config(head=HeadConfig(kind=HeadKind.eagle3), train=TrainConfig(loss=LossConfig(hidden_weight=0.5)))


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    documents = random_documents([12, 9, 15, 8, 11, 10], vocab_size=VOCAB)
    make_store(folder, documents, {name: random_state(documents, name, HIDDEN) for name in ("final", *AUX)})
    return Store.open(folder, ["final", *AUX])


def trainer(store: Store, folder: Path, head: DraftHead, config: TrainConfig) -> Trainer:
    embed = small_embed()
    ids = head.draft_ids
    return Trainer(
        config,
        seed=1,
        drafter=bound(head, embed),
        loss_head=LmHead(embed) if ids is None else LmHead(embed[ids], ids_V=ids),
        store=store,
        documents=store.indices("train"),
        folder=folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        evaluate=lambda _: {"mean_accepted_length": 1.0},
        on_log=lambda _: None,
    )


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3.1", "eagle3, reduced vocabulary", "eagle3, the target's rows"])
def test_loss_and_gradients_equal_float64_autograd(store: Store, tmp_path: Path, name: str) -> None:
    """sum_k w_k (kl_weight KL + hidden_weight smooth-L1) over rows whose label can be drafted, / all supervised rows.

    The teacher is over the draft vocabulary. The gradient of every parameter, the
    head's own projection among them, by autograd through the re-derivation."""
    head = made(name, std=0.2)
    loss = LossConfig(kl_weight=0.1, hidden_weight=1.0, chunk_rows=4) if name == "eagle" else LossConfig(chunk_rows=4)
    made_trainer = trainer(store, tmp_path, head, TrainConfig(steps=3, batch_tokens=1000, loss=loss))
    embed = small_embed().double()
    independent = rederived(head)
    weights = {n: p.detach().double().requires_grad_() for n, p in head.named_parameters()}
    independent.w = weights
    ids = torch.arange(VOCAB) if head.draft_ids is None else head.draft_ids
    projection = weights["lm_head.weight"] if head.lm_head is not None else embed[ids]
    total, rows, unknown = torch.zeros((), dtype=torch.float64), 0, 0
    for i in store.indices("train"):
        entry, tokens = store.entries[i], store.tokens(i).tolist()
        states = {capture: store.state(i, capture).float() for capture in ("final", *AUX)}
        finals = states["final"].double()
        hidden = first_hidden(independent, head, states, slice(0, len(tokens)))
        for start, end in entry.spans:
            for p in range(start - 1, end - 2):
                rows += 1
                for k, state in enumerate(independent.draft_states(embed, tokens, hidden, p, min(3, end - 2 - p))):
                    if tokens[p + 2 + k] not in ids:
                        unknown += 1
                        continue
                    log_p, log_q = (embed[ids] @ finals[p + 1 + k]).log_softmax(-1), (projection @ state).log_softmax(-1)
                    distance = (state - finals[p + 1 + k]).abs()
                    smooth = torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean()
                    total = total + 0.8**k * (loss.kl_weight * (log_p.exp() * (log_p - log_q)).sum() + loss.hidden_weight * smooth)
    (total / rows).backward()
    assert (unknown > 0) == (head.draft_ids is not None)
    row = made_trainer.update(made_trainer.updates[0])
    assert row["loss"] == pytest.approx(float(total) / rows, rel=1e-4)
    norm = torch.stack([w.grad.norm() for w in weights.values() if w.grad is not None]).norm()
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    factor = min(1.0, 0.5 / float(norm))  # clipped in place
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None, key
        expected = weights[key].grad
        assert expected is not None
        torch.testing.assert_close(parameter.grad.double(), expected * factor, rtol=2e-3, atol=1e-6)


def test_fault_08_a_label_outside_the_draft_vocabulary_is_a_miss(store: Store, tmp_path: Path) -> None:
    """A head whose only id is never the label matches nowhere, though over its own vocabulary it is always right."""
    labels = {int(t) for i in store.indices("train") for t in store.tokens(i)}
    ids = torch.tensor(sorted(set(range(VOCAB)) - labels)[:1] or [0])
    batchless = small_head(SPEC, kind=HeadKind.eagle3, aux_captures=AUX, draft_ids=ids)
    made_trainer = trainer(store, tmp_path, batchless, TrainConfig(steps=2, batch_tokens=1000))
    found = made_trainer.update(made_trainer.updates[0])["match"]
    share = [sum(t == int(ids[0]) for t in _labels(store, k)) / len(_labels(store, k)) for k in range(2)]
    assert found == pytest.approx(share)
    assert max(share) < 0.5


def _labels(store: Store, k: int) -> list[int]:
    return [
        int(store.tokens(i)[p + 2 + k])
        for i in store.indices("train")
        for start, end in store.entries[i].spans
        for p in range(start - 1, end - 2 - k)
    ]


def test_feature_noise_is_bounded_seeded_and_only_what_the_head_reads(store: Store, tmp_path: Path) -> None:
    config = TrainConfig(steps=1, batch_tokens=1000, feature_noise=0.1)
    one, again = (trainer(store, tmp_path / n, made("eagle"), config) for n in "ab")
    documents = one.updates[0][0]
    noise = one._noise(documents, 0)
    assert noise is not None
    assert torch.equal(noise, again._noise(documents, 0))
    assert not torch.equal(noise, one._noise(documents, 1))
    lengths = [store.entries[i].length for i in documents]
    for part, length in zip(noise.split(lengths), lengths, strict=True):
        bound_ = 0.1 * 512 / length
        assert 0.5 * bound_ < float(part.abs().max()) <= bound_
    assert one.update(one.updates[0])["loss"] == again.update(again.updates[0])["loss"]
    silent = trainer(store, tmp_path / "c", made("eagle"), TrainConfig(steps=1, batch_tokens=1000))
    assert silent._noise(documents, 0) is None


def test_a_run_with_a_reduced_vocabulary_resumes_to_the_same_bits(store: Store, tmp_path: Path) -> None:
    config = TrainConfig(steps=2, epochs=4, batch_tokens=24, eval_every=2, checkpoint_every=2, ema=0.9, feature_noise=0.1)
    whole = trainer(store, tmp_path / "whole", made("eagle3, reduced vocabulary"), config)
    whole.run()
    half = trainer(store, tmp_path / "half", made("eagle3, reduced vocabulary"), config)
    half.updates = half.updates[: len(whole.updates)]
    full, half.updates = half.updates, half.updates[:4]
    half._resume()
    while half.progress.update < 4:
        half.updates = full  # the schedule is the whole run's
        half.update(full[half.progress.update])
    half._save()
    resumed = trainer(store, tmp_path / "half", made("eagle3, reduced vocabulary"), config)
    resumed.run()
    for key, tensor in whole.head.state_dict().items():
        assert torch.equal(resumed.head.state_dict()[key], tensor), key
    assert torch.equal(whole.head.state_dict()["draft_ids"], IDS)
    for key, tensor in whole.ema.items():
        assert torch.equal(resumed.ema[key], tensor)


def test_heads_of_every_kind_have_the_parameters_that_plan_counts() -> None:
    from mtptrain.sizes import head_parameters

    for options in HEADS.values():
        config = HeadConfig(**{k: v for k, v in options.items() if k != "draft_ids"})
        assert head_parameters(config, SPEC) == sum(p.numel() for p in build_head(config, SPEC).parameters())
    reduced = HeadConfig(kind=HeadKind.eagle3, draft_vocabulary=len(IDS))
    assert head_parameters(reduced, SPEC) == sum(p.numel() for p in build_head(reduced, SPEC, IDS).parameters())


def test_as_many_key_value_heads_as_asked_for() -> None:
    groups = {asked: small_head(SPEC, kind=HeadKind.eagle3, num_kv_heads=asked).layer.config.num_kv_heads for asked in (None, 0, 1, 4)}
    assert groups == {None: 2, 0: 4, 1: 1, 4: 4}
    with pytest.raises(UserError, match=r"head\.num_kv_heads=3: the target's 4 query heads cannot share them evenly"):
        small_head(SPEC, kind=HeadKind.eagle3, num_kv_heads=3)
