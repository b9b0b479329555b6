"""`python -m mtptrain.store`: what it tells of a store, what it finds in a damaged one, and runs made of others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtptrain import manifest
from mtptrain.config import OnStale
from mtptrain.data.documents import FILE, HELD_OUT, TRAIN, Document, check_documents, read_documents, write_documents
from mtptrain.errors import UserError
from mtptrain.files import hash_file
from mtptrain.store.__main__ import main
from mtptrain.store.codecs import CODECS, StateCodec
from mtptrain.store.derive import content, filter_run, merge
from mtptrain.store.format import TOKENS, part_path, sidecar_path
from mtptrain.store.reader import Store
from mtptrain.store.verify import describe, find_damage
from tests.unit.stores import make_store, random_documents, random_state

CAPTURES = ["final", "after_1"]
DATA_INPUTS = {"target": "t", "tokenizer and template": "k", "stop_ids": [2], "seed": 0}


def make_run(folder: Path, documents: list[Document], codec: StateCodec = CODECS["int8"], **inputs: Any) -> None:
    """A finished run of these documents, three or so a shard."""
    (folder / "data").mkdir(parents=True)
    write_documents(folder / "data", documents)
    written = hash_file(folder / "data" / FILE)
    manifest.finish(folder / "data", DATA_INPUTS | inputs, {FILE: written, "rows": len(documents)})
    common = {
        "target": "t",
        "tokenizer": "k",
        "dtype": "float32",
        "store.codec": codec.tag,
        "store.aux_codec": codec.tag,
        "store_format": 1,
    }
    states = {c: [s * (1 + i) for i, s in enumerate(random_state(documents, c, 64, seed=len(documents)))] for c in CAPTURES}
    make_store(folder / "store", documents, states, shard_tokens=40, inputs=common | {"documents": written} | inputs, codecs=(codec, codec))
    found = manifest.require(folder / "store", "", "")
    manifest.finish(folder / "store", found["inputs"], found["results"] | {"hidden_size": 64})


def everything(run: Path) -> dict[str, tuple[str, list[int], list[tuple[int, int]], list[torch.Tensor]]]:
    """By content: split, tokens, spans and states of each document."""
    store = Store.open(run / "store", CAPTURES)
    documents = {d.id: d for d in read_documents(run / "data")}
    return {
        content(documents[e.id]): (e.split, store.tokens(i).tolist(), e.spans, [store.state(i, c).clone() for c in CAPTURES])
        for i, e in enumerate(store.entries)
    }


def same(one: Any, other: Any) -> bool:
    return one[:3] == other[:3] and all(torch.equal(a, b) for a, b in zip(one[3], other[3], strict=True))


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda c: c.name)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_merged_run_has_every_document_once_with_its_very_states(
    codec: StateCodec, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("runs")
    runs = []
    for number in range(data.draw(st.integers(2, 3))):
        lengths = data.draw(st.lists(st.integers(2, 30), min_size=4, max_size=10))
        documents = random_documents(lengths, seed=number)
        if runs and data.draw(st.booleans()):
            documents += [Document(id="again", source="z", split=TRAIN, tokens=d.tokens, spans=d.spans) for d in runs[0][1][:2]]
        runs.append((root / str(number), documents))
        make_run(root / str(number), documents, codec)
    dropped = merge(root / "all", [folder for folder, _ in runs])
    merged = everything(root / "all")
    held_out = {content(d) for _, documents in runs for d in documents if d.split == HELD_OUT}
    prompts = {tuple(d.tokens[: d.spans[0][0]]) for _, documents in runs for d in documents if d.split == HELD_OUT}
    expected = held_out | {
        content(d) for _, documents in runs for d in documents if d.split == TRAIN and tuple(d.tokens[: d.spans[0][0]]) not in prompts
    }
    assert merged.keys() == expected
    sources = [everything(folder) for folder, _ in runs]
    for key, found in merged.items():
        assert any(key in source and same(source[key], found) for source in sources)
    assert len({d.id for d in read_documents(root / "all/data")}) == len(merged)
    assert sum(dropped.values()) + len(merged) == sum(len(documents) for _, documents in runs)
    assert not any(split == TRAIN and key in held_out for key, (split, *_) in merged.items())
    assert list(find_damage(root / "all/store")) == []
    assert [d.id for d in read_documents(root / "all/data")] == [e.id for e in Store.open(root / "all/store", CAPTURES).entries]


def test_a_training_document_with_a_held_out_prompt_of_another_run_is_dropped(tmp_path: Path) -> None:
    held = Document(id="h", source="a", split=HELD_OUT, tokens=[1, 2, 3, 4, 5], spans=[(3, 5)])
    leak = Document(id="l", source="a", split=TRAIN, tokens=[1, 2, 3, 9, 9, 9], spans=[(3, 6)])
    other = Document(id="o", source="a", split=TRAIN, tokens=[1, 2, 4, 9, 9, 9], spans=[(3, 6)])
    make_run(tmp_path / "a", [leak, other])
    make_run(tmp_path / "b", [held])
    assert merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"]) == {"shares a prompt with held-out": 1}
    assert [d.id for d in read_documents(tmp_path / "all/data")] == ["o", "h"]


def test_filtering_keeps_what_fits_every_condition(tmp_path: Path) -> None:
    documents = random_documents([5, 9, 30, 12, 35, 3, 8, 22])
    make_run(tmp_path / "run", documents)
    before = everything(tmp_path / "run")
    dropped = filter_run(tmp_path / "some", tmp_path / "run", sources=["a", "b"], without_ids=["doc-0"], tokens=(4, 30))
    wanted = [d for d in documents if d.source in "ab" and d.id != "doc-0" and 4 <= len(d.tokens) <= 30]
    after = everything(tmp_path / "some")
    assert after.keys() == {content(d) for d in wanted}
    assert all(same(after[key], before[key]) for key in after)
    assert sum(dropped.values()) == len(documents) - len(wanted)
    with pytest.raises(UserError, match=r"no document is left \(8 dropped by length\)"):
        filter_run(tmp_path / "none", tmp_path / "run", tokens=(99, None))
    with pytest.raises(UserError, match=r"has no source 'q'; it has a, b, c"):
        filter_run(tmp_path / "none", tmp_path / "run", sources=["q"])


@pytest.mark.parametrize(
    ("change", "said"), [({"target": "x"}, "target: 'x' and 't'"), ({"dtype": "bfloat16"}, "dtype: 'bfloat16' and 'float32'")]
)
def test_runs_that_do_not_belong_together_are_refused_with_both_values(tmp_path: Path, change: dict[str, str], said: str) -> None:
    make_run(tmp_path / "a", random_documents([5, 9]))
    make_run(tmp_path / "b", random_documents([5, 9], seed=1), **change)
    with pytest.raises(UserError, match=f"differ in {said}"):
        merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    make_run(tmp_path / "c", random_documents([5, 9], seed=1), CODECS["fp8"])
    with pytest.raises(UserError, match=r"differ in store\.codec: \{'name': 'fp8'.* and \{'name': 'int8'"):
        merge(tmp_path / "all", [tmp_path / "a", tmp_path / "c"])


def test_a_derived_stage_is_compared_by_what_its_runs_had_in_common(tmp_path: Path) -> None:
    make_run(tmp_path / "a", random_documents([5, 9]), seed=1)
    make_run(tmp_path / "b", random_documents([6, 8], seed=1), seed=2)
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    data = tmp_path / "all/data"
    assert manifest.is_complete(data, DATA_INPUTS | {"seed": 7, "data.train": ["x"]}, OnStale.error)
    with pytest.raises(UserError, match=r"target: 't' -> 'x'"):
        manifest.is_complete(data, DATA_INPUTS | {"target": "x"}, OnStale.error)
    with pytest.raises(UserError, match="is there already"):
        merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])


def test_a_merge_that_was_interrupted_is_made_anew_and_any_other_run_is_left(tmp_path: Path) -> None:
    make_run(tmp_path / "a", random_documents([5, 9]))
    make_run(tmp_path / "b", random_documents([6, 8], seed=1))
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    whole = everything(tmp_path / "all")
    (tmp_path / "all/store" / manifest.MANIFEST).unlink()
    sidecar_path(tmp_path / "all/store", 0).unlink()
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    made = everything(tmp_path / "all")
    assert made.keys() == whole.keys()
    assert all(same(made[key], whole[key]) for key in whole)
    stray = tmp_path / "all/store/00077.tokens.safetensors"  # of a killed merge of more runs
    stray.write_bytes(b"")
    (tmp_path / "all/store" / manifest.MANIFEST).unlink()
    (tmp_path / "all/data" / manifest.MANIFEST).unlink()
    with pytest.raises(UserError, match="interrupted; give that command again"):
        manifest.is_complete(tmp_path / "all/data", DATA_INPUTS, OnStale.error)
    filter_run(tmp_path / "all", tmp_path / "a")
    assert not stray.exists()
    (tmp_path / "a/store" / manifest.MANIFEST).unlink()  # its data alone is finished
    with pytest.raises(UserError, match="is there already"):
        filter_run(tmp_path / "a", tmp_path / "b")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(bytes(content))


def test_verify_names_every_damaged_file_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    make_run(run, random_documents([20, 25, 30, 35]))
    store = run / "store"
    assert main(["verify", str(run)]) == 0
    assert "is whole" in capsys.readouterr().out
    _flip(part_path(store, 0, "final"))
    part_path(store, 1, TOKENS).unlink()
    _flip(sidecar_path(store, 2))
    cut = part_path(store, 3, "after_1")
    cut.write_bytes(cut.read_bytes()[:-1])
    (store / "00009.final.safetensors").write_bytes(b"foreign")
    assert main(["verify", str(store)]) == 2
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert len(lines) == 5, lines  # the corrupt file that was set aside is no problem of its own
    for file, word in (
        ("00000.final.safetensors", "corrupt"),
        ("00001.tokens.safetensors", "missing"),
        ("00002.json", "damaged"),
        ("00003.after_1.safetensors", "cut short"),
        ("00009.final.safetensors", "no file of this store"),
    ):
        assert any(file in line and word in line for line in lines), (file, lines)
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1


def test_fast_verification_reads_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    make_run(run, random_documents([20, 25]))
    _flip(part_path(run / "store", 0, "final"))
    assert main(["verify", "--fast", str(run)]) == 0
    assert "not hashed" in capsys.readouterr().out
    assert main(["verify", str(run)]) == 2


def test_info_counts_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    documents = random_documents([20, 25, 30, 35])
    make_run(run, documents)
    found = describe(run / "store")
    assert (found["documents"], found["tokens"], found["shards"]) == (4, 110, 4)
    assert found["supervised_tokens"] == sum(e - s for d in documents for s, e in d.spans)
    assert found["bytes"] == sum(p.stat().st_size for p in (run / "store").glob("*.safetensors"))
    assert found["parts"]["final"]["codec"] == "int8 1"
    assert main(["info", str(run)]) == 0
    assert "int8 1" in capsys.readouterr().out
    assert main(["info", "--json", str(run)]) == 0
    assert capsys.readouterr().out.startswith("{")


@pytest.mark.parametrize(
    "words",
    [
        ["info", "nowhere"],
        ["verify", "nowhere"],
        ["merge", "new", "a"],
        ["merge", "new", "a", "./a"],
        ["filter", "new", "nowhere", "--ids", "/dev/null"],
        ["filter", "new", "nowhere"],
        ["filter", "new", "nowhere", "--ids", "no"],
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_run_without_documents_of_a_split_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = random_documents([20, 25, 30, 35])
    make_run(tmp_path / "run", documents)
    assert {d.split for d in documents} == {TRAIN, HELD_OUT}
    assert main(["filter", str(tmp_path / "new"), str(tmp_path / "run"), "--split", TRAIN]) == 0
    assert "no held_out documents" in capsys.readouterr().out
    assert main(["filter", str(tmp_path / "all"), str(tmp_path / "run")]) == 0
    assert "documents, and" not in capsys.readouterr().out


def test_two_answers_to_a_held_out_prompt_are_one_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = random_documents([20, 25, 30, 35])
    again = [Document(id=d.id, source=d.source, split=d.split, tokens=[*d.tokens[:-1], 3], spans=d.spans) for d in documents]
    assert all(one.tokens != other.tokens for one, other in zip(documents, again, strict=True))
    for name, those in (("a", documents), ("b", again)):
        make_run(tmp_path / name, those)
    dropped = merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    held_out = [d for d in documents if d.split == HELD_OUT]
    assert dropped["held-out with the prompt of another run's"] == len(held_out) > 0
    kept = read_documents(tmp_path / "all/data")
    assert [d.tokens for d in kept if d.split == HELD_OUT] == [d.tokens for d in held_out]


def test_a_folder_of_another_stage_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", random_documents([20, 25]))
    assert main(["verify", str(tmp_path / "run/data")]) == 2
    assert "another stage" in capsys.readouterr().err


def test_what_was_made_of_other_runs_is_never_redone_and_never_prepared_anew(tmp_path: Path) -> None:
    make_run(tmp_path / "a", random_documents([5, 9]))
    filter_run(tmp_path / "some", tmp_path / "a")
    data = tmp_path / "some/data"
    with pytest.raises(UserError, match="can't be redone"):
        manifest.is_complete(data, DATA_INPUTS | {"target": "x"}, OnStale.redo)
    (data / FILE).write_bytes(b"")
    with pytest.raises(UserError, match="merge or filter again"):
        check_documents(data, manifest.require(data, "", "")["results"])
    with pytest.raises(UserError, match="inside of the run"):
        filter_run(tmp_path / "a/b", tmp_path / "a")
