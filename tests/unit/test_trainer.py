"""The loop on a small store: loss by definition, exact resume, frozen ends, best checkpoint, order of the data."""

import os
import platform
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtptrain import batches, heap
from mtptrain.checkpoint import checkpoints
from mtptrain.config import BadUpdate, LossConfig, OptimConfig, TrainConfig
from mtptrain.data.order import epoch_batches
from mtptrain.errors import UserError
from mtptrain.files import hash_bytes, read_jsonl_durable
from mtptrain.heads.head import DraftHead
from mtptrain.heads.layers import compile_layer
from mtptrain.heads.lm_head import LmHead
from mtptrain.ranks import Ranks
from mtptrain.signals import Interrupted, check
from mtptrain.store.reader import Store
from mtptrain.trainer import Trainer
from tests.unit.heads import EPS, HIDDEN, THETA, VOCAB, bound, small_embed, small_head, small_spec
from tests.unit.rederive import Mtp64
from tests.unit.stores import make_store, random_documents, random_state

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    documents = random_documents([12, 9, 15, 8, 11, 10, 7, 14, 13, 6], vocab_size=VOCAB)
    make_store(folder, documents, {"final": random_state(documents, "final", HIDDEN)})
    return Store.open(folder, ["final"])


def small_config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "steps": 3,
        "epochs": 3,
        "batch_tokens": 24,
        "log_every": 1,
        "eval_every": 2,
        "checkpoint_every": 2,
        "loss": LossConfig(hidden_weight=0.5, chunk_rows=4),
        "optim": OptimConfig(lr=1e-2),
    }
    return TrainConfig(**(values | changes))


def trainer(store: Store, folder: Path, config: TrainConfig, scores: dict[int, float] | None = None, stop_at: int | None = None) -> Trainer:
    """A trainer whose evaluation returns `scores` by update, and which dies at update `stop_at`."""
    embed = small_embed()
    lm_head = LmHead(embed)

    def evaluate(_head: DraftHead) -> dict[str, Any]:
        return {"mean_accepted_length": (scores or {}).get(made.progress.update, 1.0)}

    def on_log(row: dict[str, Any]) -> None:
        if stop_at is not None and row["update"] >= stop_at and "loss" in row:
            raise KeyboardInterrupt

    made = Trainer(
        config,
        seed=1,
        drafter=bound(small_head(small_spec(), std=0.1), embed),
        loss_head=lm_head,
        store=store,
        documents=store.indices("train"),
        folder=folder,
        dtype=torch.float32,
        device=CPU,
        evaluate=evaluate,
        on_log=on_log,
    )
    return made


def weights_hash(head: torch.nn.Module) -> str:
    return hash_bytes(b"".join(p.detach().numpy().tobytes() for _, p in sorted(head.named_parameters())))


def test_first_loss_equals_its_definition_in_float64(store: Store, tmp_path: Path) -> None:
    """sum_k w_k (sum over valid rows of KL + lambda * mean smooth-L1) / N, row by row from the formulas."""
    config = small_config(accumulate=2)
    made = trainer(store, tmp_path, config)
    embed = small_embed().double()
    independent = Mtp64({n: p.detach().clone() for n, p in made.head.named_parameters()}, 4, 2, 4, EPS, THETA)
    total, rows = 0.0, 0
    for i in [i for batch in made.updates[0] for i in batch]:
        entry, tokens, finals = store.entries[i], store.tokens(i).tolist(), store.state(i, "final").double()
        for start, end in entry.spans:
            for p in range(start - 1, end - 2):
                rows += 1
                depth = min(3, end - 2 - p)
                for k, state in enumerate(independent.draft_states(embed, tokens, finals, p, depth)):
                    log_p, log_q = ((embed @ x).log_softmax(-1) for x in (finals[p + 1 + k], state))
                    kl = float((log_p.exp() * (log_p - log_q)).sum())
                    distance = (state - finals[p + 1 + k]).abs()
                    hidden = float(torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean())
                    total += 0.8**k * (kl + 0.5 * hidden)
    assert made.update(made.updates[0])["loss"] == pytest.approx(total / rows, rel=1e-4)
    assert made.progress.supervised == rows


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_batches_read_ahead_train_the_same_bits(store: Store, tmp_path: Path, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here, ahead = (trainer(store, tmp_path / f"{p}", small_config(prefetch=p, accumulate=accumulate)) for p in (False, True))
    here.run()
    threads: list[str] = []
    read = ahead._loader._read

    def noted(documents: list[int]) -> batches.Batch:
        threads.append(threading.current_thread().name)
        return read(documents)

    monkeypatch.setattr(ahead._loader, "_read", noted)
    ahead.run()
    assert weights_hash(ahead.head) == weights_hash(here.head)
    assert sum("MainThread" in name for name in threads) == 1, "only the first batch is not known before"
    assert len(threads) == sum(map(len, ahead.updates))


def test_a_rank_without_a_batch_in_the_next_update_reads_nothing_ahead(store: Store, tmp_path: Path) -> None:
    made = trainer(store, tmp_path, small_config(prefetch=True, accumulate=4))
    made._stepper._ranks = Ranks(rank=3, world=4)
    made.updates = [[[0], [1], [2], [3]], [[4], [5], [6]]]
    assert made._after() is None
    made._stepper._ranks = Ranks(rank=2, world=4)
    assert made._after() == [6]


def test_a_batch_of_other_documents_than_were_said_to_follow_is_read_anew(store: Store) -> None:
    loader = batches.Loader(store, ["final"], 3, torch.float32, CPU, ahead=True)
    loader.load([0], following=[1, 2])
    assert loader.load([3]).documents == [3]
    assert loader.load([1, 2]).documents == [1, 2]


@pytest.mark.slow
def test_a_compiled_layer_computes_the_same() -> None:
    spec = small_spec()
    plain, compiled = small_head(spec, std=0.1), small_head(spec, std=0.1)
    compile_layer(compiled.layer)
    for count in (20, 33):
        x_RH, position = torch.randn(count, HIDDEN), torch.arange(count)
        outcomes = []
        for head in (plain, compiled):
            head.zero_grad()
            q = head.layer.query(x_RH, position)
            k, v = head.layer.key_value(x_RH, position)
            out = head.layer.finish(x_RH, q)
            (out.square().sum() + k.square().sum() + v.square().sum()).backward()
            outcomes.append([q, k, v, out, *(p.grad for p in head.layer.parameters())])
        for a, b in zip(*outcomes, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "accumulate": 2}])
@pytest.mark.parametrize("stop_at", [1, 2, 3, 5, 6])
def test_a_killed_run_resumes_to_the_same_bits(store: Store, tmp_path: Path, changes: dict[str, Any], stop_at: int) -> None:
    config = small_config(**changes)
    whole = trainer(store, tmp_path / "whole", config)
    whole.run()
    assert len(whole.updates) >= 6
    with pytest.raises(KeyboardInterrupt):
        trainer(store, tmp_path / "killed", config, stop_at=stop_at).run()
    resumed = trainer(store, tmp_path / "killed", config)
    resumed.run()
    assert weights_hash(resumed.head) == weights_hash(whole.head)
    for name in whole.ema:
        assert torch.equal(resumed.ema[name], whole.ema[name])
    logs = [
        [{k: v for k, v in row.items() if "per_second" not in k} for row in read_jsonl_durable(tmp_path / run / "log.jsonl")]
        for run in ("whole", "killed")
    ]
    assert logs[0] == logs[1]


def test_old_checkpoints_that_a_kill_left_are_deleted_later(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no further one will be saved: a run ends as if it had been left alone."""
    config, folder = small_config(keep=1, checkpoint_every=2), tmp_path / "checkpoints"

    def killed(folder: Path, keep: int) -> None:
        if len(checkpoints(folder)) > keep:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mtptrain.trainer.prune", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer(store, tmp_path, config).run()
    assert [f.name for f in checkpoints(folder)] == ["00000002", "00000004"]
    trainer(store, tmp_path, config)._resume()
    assert [f.name for f in checkpoints(folder)] == ["00000004"]


def test_fault_17_a_large_batch_hands_back_freed_memory_before_its_loss(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which changes no bit. What it saves is tools/bench_memory.py's to measure."""
    plain = trainer(store, tmp_path / "plain", small_config())
    plain.run()
    called: list[int] = []
    monkeypatch.setattr("mtptrain.objective._LARGE", 1)
    monkeypatch.setattr("mtptrain.objective.give_back", lambda: called.append(heap.give_back()))
    large = trainer(store, tmp_path / "large", small_config())
    large.run()
    assert len(called) == sum(len(batches) for batches in large.updates)
    assert weights_hash(large.head) == weights_hash(plain.head)
    assert (heap._malloc_trim() is not None) == (platform.libc_ver()[0] == "glibc")


def test_fault_15_frozen_ends_do_not_move(store: Store, tmp_path: Path) -> None:
    made = trainer(store, tmp_path, small_config())
    embed = made._drafter.embed_VH
    before, head_before = hash_bytes(embed.numpy().tobytes()), weights_hash(made.head)
    made.run()
    assert hash_bytes(embed.numpy().tobytes()) == before
    assert weights_hash(made.head) != head_before
    assert not embed.requires_grad
    assert not any("embed_tokens" in n or "lm_head" in n for n, _ in made.head.named_parameters())


def test_best_checkpoint_is_the_one_with_the_longest_walk(store: Store, tmp_path: Path) -> None:
    made = trainer(store, tmp_path, small_config(), scores={2: 1.2, 4: 1.5, 6: 1.4})
    progress = made.run()
    assert (progress.best_update, progress.best_score) == (4, 1.5)


def test_fault_14_loss_is_divided_by_supervised_rows_not_tokens(store: Store, tmp_path: Path) -> None:
    """Accumulating two batches gives the gradient of one batch with the same documents."""
    small = trainer(store, tmp_path / "a", small_config(accumulate=2, epochs=1))
    documents = [i for batch in small.updates[0] for i in batch]
    large = trainer(store, tmp_path / "b", small_config(batch_tokens=1000, epochs=1))
    first, second = small.update(small.updates[0]), large.update([documents])
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)


def test_a_nan_loss_stops_before_the_optimizer_step_and_names_the_documents(store: Store, tmp_path: Path) -> None:
    made = trainer(store, tmp_path, small_config())
    with torch.no_grad():
        made.head.eh_proj.weight[0, 0] = float("nan")
    before = weights_hash(made.head)
    with pytest.raises(UserError, match=r"loss is nan at update 1.*doc-"):
        made.update(made.updates[0])
    assert weights_hash(made.head) == before


def _bad_updates(made: Trainer, monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """Multiply the loss of some updates."""
    whole = made.objective.of

    def batch_loss(*arguments: Any) -> Any:
        loss, statistics = whole(*arguments)
        return loss * factors.get(made.progress.update, 1.0), statistics

    monkeypatch.setattr(made.objective, "of", batch_loss)


def test_a_bad_update_is_passed_over_as_if_it_had_not_been(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer takes no step, not even with the moments it has; the row says which documents."""
    made = trainer(store, tmp_path, small_config(bad_update=BadUpdate.skip))
    _bad_updates(made, monkeypatch, {1: float("nan"), 2: float("inf")})
    made.update(made.updates[0])
    before, averaged = weights_hash(made.head), made.progress.mean_loss
    rows = [made.update(made.updates[n]) for n in (1, 2)]
    assert weights_hash(made.head) == before
    assert [r["skipped"] for r in rows] == ["loss is nan", "loss is inf"]
    assert rows[0]["documents"] == [store.entries[i].id for batch in made.updates[1] for i in batch]
    assert (made.progress.update, made.progress.skipped, made.progress.mean_loss) == (3, 2, averaged)
    assert "loss" in made.update(made.updates[3])
    assert weights_hash(made.head) != before


def test_more_bad_updates_than_allowed_stop_the_training(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(store, tmp_path, small_config(bad_update=BadUpdate.skip, max_skipped=2))
    _bad_updates(made, monkeypatch, {1: float("nan"), 3: float("nan"), 4: float("nan")})
    with pytest.raises(UserError, match=r"loss is nan at update 5.*doc-.*one more than train\.max_skipped=2"):
        made.run()
    skipped = [row["update"] for row in read_jsonl_durable(tmp_path / "log.jsonl") if "skipped" in row]
    assert skipped == [2, 4]


def test_a_gradient_that_is_not_finite_stops_before_the_optimizer_step(store: Store, tmp_path: Path) -> None:
    made = trainer(store, tmp_path, small_config())
    made.head.eh_proj.weight.register_hook(lambda grad: grad * float("inf"))
    before = weights_hash(made.head)
    with pytest.raises(UserError, match=r"gradient's norm is (inf|nan) at update 1.*doc-.*train\.bad_update=skip"):
        made.update(made.updates[0])
    assert weights_hash(made.head) == before


@pytest.mark.parametrize(("factor", "spike"), [(200.0, True), (4.0, False)])
def test_a_spike_is_a_loss_many_times_the_mean_of_those_before(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, spike: bool
) -> None:
    made = trainer(store, tmp_path, small_config(epochs=9, bad_update=BadUpdate.skip))
    assert len(made.updates) > 24
    _bad_updates(made, monkeypatch, {1: 20.0, 22: factor})  # at first there is nothing to compare with
    made.run()
    assert made.progress.skipped == int(spike)
    rows = [row for row in read_jsonl_durable(tmp_path / "log.jsonl") if "skipped" in row]
    assert [row["update"] for row in rows] == [23] * spike
    assert all("times the mean of those before" in row["skipped"] for row in rows)


@pytest.mark.parametrize("where", ["update", "evaluation"])
def test_a_terminated_run_saves_and_resumes_to_the_same_bits(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In an update it is heard once that is done, in a walk at its next batch; the walk that was cut is done anew."""
    config = small_config(checkpoint_every=100)
    whole = trainer(store, tmp_path / "whole", config, scores={4: 1.5})
    whole.run()
    ended = trainer(store, tmp_path / "ended", config, scores={4: 1.5})
    update, evaluate = ended.update, ended._evaluate

    def terminated_update(batches: list[list[int]]) -> dict[str, Any]:
        if where == "update" and ended.progress.update == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(batches)

    def terminated_walk(head: DraftHead) -> dict[str, Any]:
        if where == "evaluation" and ended.progress.update == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        check()
        return evaluate(head)

    monkeypatch.setattr(ended, "update", terminated_update)
    monkeypatch.setattr(ended, "_evaluate", terminated_walk)
    with pytest.raises(Interrupted):
        ended.run()
    assert [f.name for f in (tmp_path / "ended/checkpoints").iterdir()] == ["00000004"]
    resumed = trainer(store, tmp_path / "ended", config, scores={4: 1.5})
    progress = resumed.run()
    assert weights_hash(resumed.head) == weights_hash(whole.head)
    assert (progress.best_update, progress.best_score) == (4, 1.5)
    logs = [[(row["update"], "walk" in row) for row in read_jsonl_durable(tmp_path / run / "log.jsonl")] for run in ("whole", "ended")]
    assert logs[0] == logs[1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 80), st.integers(0, 5), st.integers(0, 3))
def test_epoch_batches_hold_each_document_once_within_the_budget(lengths: list[int], budget: int, seed: int, epoch: int) -> None:
    documents = [10 + i for i in range(len(lengths))]
    batches = epoch_batches(documents, lengths, budget=budget, seed=seed, epoch=epoch)
    assert sorted(d for b in batches for d in b) == documents
    for batch in batches:
        assert sum(lengths[d - 10] for d in batch) <= budget or len(batch) == 1
    assert batches == epoch_batches(documents, lengths, budget=budget, seed=seed, epoch=epoch)


def test_epochs_are_shuffled_differently() -> None:
    documents = list(range(30))
    orders = [[d for b in epoch_batches(documents, [1] * 30, budget=4, seed=0, epoch=e) for d in b] for e in range(2)]
    assert orders[0] != orders[1]
