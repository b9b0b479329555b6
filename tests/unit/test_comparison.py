"""The heads of a run side by side: the record by hand-made numbers, what is left out, and when a comparison is made."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtptrain import cli
from mtptrain.config import Config
from mtptrain.errors import UserError
from mtptrain.files import read_json
from mtptrain.report.comparison import compare_run, comparison, head_record, notes
from mtptrain.report.comparison_page import acceptance
from mtptrain.report.console import print_comparison
from mtptrain.stages import compare
from tests.unit.comparison_case import four_heads, report_of, write_export, write_run
from tests.unit.report_case import minimal_report


def statistics(documents: int, length: float | None, ci: list[float] | None, step: float, rates: list[float | None]) -> dict[str, Any]:
    return {
        "documents": documents,
        "generated_tokens": 50 * documents,
        "drafts": 40,
        "accepted": 20,
        "mean_accepted_length": length,
        "mean_accepted_length_ci95": ci,
        "accept_rate_per_position": [0.25, 0.125],
        "conditional_accept_rate": rates,
        "tokens_per_target_step": step,
        "tokens_per_target_step_ci95": None,
    }


def by_hand() -> dict[str, Any]:
    code = statistics(1, 1.75, None, 1.7, [0.5, 0.5])
    return {
        "schema": 3,
        "target": {"path": "models/t", "weights": "abc"},
        "head": {
            "kind": "eagle3",
            "parameters": 11,
            "parameters_per_drafted_token": 12,
            "captures": ["after_1"],
            "draft_vocabulary": 13,
            "store_bytes_per_token": 14,
        },
        "k": 2,
        "training": {"seconds": 1.5, "supervised_rows": 15},
        "walk": {"k": 2, "overall": statistics(9, 1.125, [1.0, 1.25], 1.1, [0.5, None]), "by_source": {}},
        "reference": {"k": 2, "overall": statistics(2, 1.5, [1.25, 1.75], 1.4, [0.25, 0.5]), "by_source": {"code": code}},
        "engine": None,
        "speed": {
            "rows": [
                {"method": "head", "batch_size": 4, "tokens_per_second": 100.0},
                {"method": "none", "batch_size": 1, "tokens_per_second": 80.0},
                {"method": "head", "batch_size": 1, "tokens_per_second": 60.0},
            ]
        },
        "gate": {"open": False, "reasons": ["too short"]},
    }


def test_a_heads_record_by_hand() -> None:
    measured = {"documents": 2, "mean_accepted_length": 1.5, "mean_accepted_length_ci95": [1.25, 1.75]}
    measured |= {"tokens_per_target_step": 1.4, "tokens_per_target_step_ci95": None}
    code = {"documents": 1, "mean_accepted_length": 1.75, "mean_accepted_length_ci95": None}
    code |= {"tokens_per_target_step": 1.7, "tokens_per_target_step_ci95": None}
    assert head_record(by_hand()) == measured | {
        "kind": "eagle3",
        "k": 2,
        "measured_by": "reference",
        "drafts": 40,
        "conditional_accept_rate": [0.25, 0.5],
        "by_source": {"code": code},
        "walk": {"documents": 9, "generated_tokens": 450, "mean_accepted_length": 1.125, "mean_accepted_length_ci95": [1.0, 1.25]},
        "parameters": 11,
        "parameters_per_drafted_token": 12,
        "draft_vocabulary": 13,
        "captures": ["after_1"],
        "store_bytes_per_token": 14,
        "target": "abc",
        "training_seconds": 1.5,
        "supervised_rows": 15,
        "speed": [
            {"batch_size": 1, "tokens_per_second": 60.0, "against_none": 0.75},
            {"batch_size": 4, "tokens_per_second": 100.0, "against_none": None},
        ],
        "gate_open": False,
        "gate_reasons": ["too short"],
    }


def test_what_a_report_lacks_is_null() -> None:
    record = head_record(minimal_report())
    for key in ("parameters", "draft_vocabulary", "captures", "training_seconds", "supervised_rows", "gate_open", "gate_reasons"):
        assert record[key] is None, key
    assert record["speed"] == []
    assert record["measured_by"] == "walk"
    assert record["target"] == "tiny"


def test_the_strongest_measurement_counts() -> None:
    report = report_of("mtp", 1.75)
    for name in ("engine", "reference", "walk"):
        record = head_record(report)
        assert record["measured_by"] == name
        for key in ("mean_accepted_length", "mean_accepted_length_ci95", "tokens_per_target_step", "conditional_accept_rate", "drafts"):
            assert record[key] == report[name]["overall"][key]
        assert {source: s["mean_accepted_length"] for source, s in record["by_source"].items()} == {
            source: s["mean_accepted_length"] for source, s in report[name]["by_source"].items()
        }
        report[name] = None


def test_the_longest_comes_first_and_one_that_drafted_nothing_last() -> None:
    reports = four_heads()
    nothing = report_of("mtp", 1.5)
    nothing["engine"]["overall"]["mean_accepted_length"] = None
    labels = list(comparison("run", reports | {"a": nothing}, {}, [])["heads"])
    assert labels[:3] == ["eagle3", "mtp", next(label for label in reports if "script" in label)]
    assert labels[3:] == ["eagle", "a"]


def test_baselines_are_those_of_the_first_head_that_has_them() -> None:
    reports = four_heads()
    reports["eagle3"] |= {"baselines": None, "speed": None}
    record = comparison("run", reports, {}, [])
    assert record["baselines_of"] == "mtp"
    assert list(record["baselines"]) == ["none", "ngram", "draft_model"]
    assert record["baselines"]["none"] == {
        "speed": [{"batch_size": b, "tokens_per_second": s, "against_none": 1.0} for b, s in ((1, 330.0), (4, 1240.5), (16, 4010.2))]
    }
    ngram, found = record["baselines"]["ngram"], reports["mtp"]["baselines"]["ngram"]
    assert ngram["mean_accepted_length"] == found["overall"]["mean_accepted_length"]
    assert set(ngram["by_source"]) == {"chat", "code"}
    assert ngram["speed"][0] == {"batch_size": 1, "tokens_per_second": 371.3, "against_none": 371.3 / 330.0}
    assert record["heads"]["eagle3"]["speed"] == []


def test_without_an_engine_there_are_no_baselines() -> None:
    record = comparison("run", {"a": minimal_report(), "b": minimal_report()}, {}, [])
    assert (record["baselines"], record["baselines_of"], record["notes"]) == ({}, None, [])


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, dict[str, Any]]:
    """Three heads, of which the second is changed."""
    heads = {label: head_record(report_of("mtp", 1.5)) for label in ("a", "b", "c")}
    heads["b"] = copy.deepcopy(heads["b"])
    change(heads["b"])
    return heads


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda h: None, []),
        (lambda h: h.update(mean_accepted_length=9.0, training_seconds=None, kind="eagle"), []),
        (lambda h: h.update(k=5), ["different numbers of tokens, and longer drafts accept more: K = 3 (a, c); K = 5 (b)."]),
        (lambda h: h.update(measured_by="walk"), ["in different ways: serving engine (a, c); offline walk (b)."]),
        (
            lambda h: h.update(target="other"),
            ["different targets and cannot be compared: 8513bb425e5bf68b8baa7a10adaf9001 (a, c); other (b)."],
        ),
        (lambda h: h["by_source"].pop("code"), ["different documents and cannot be compared: 10 of 60 with "]),
        (lambda h: h["by_source"]["code"].update(documents=7), ["different documents and cannot be compared: 10 of 60 with "]),
        (lambda h: h["walk"].update(documents=59), ["different documents and cannot be compared: 10 of 60 with "]),
        (lambda h: h["walk"].update(generated_tokens=1), ["different documents and cannot be compared: 10 of 60 with "]),
        (lambda h: h.update(k=1, measured_by="walk"), ["different numbers of tokens", "in different ways"]),
    ],
)
def test_notes(change: Callable[[dict[str, Any]], object], expected: list[str]) -> None:
    found = notes(changed(change))
    assert len(found) == len(expected)
    for note, part in zip(found, expected, strict=True):
        assert part in note


@pytest.mark.parametrize(
    ("change", "order"),
    [
        (lambda r: None, ["c", "b", "a"]),
        (lambda r: r.update(k=5), ["c", "b", "a"]),
        (lambda r: r["walk"]["overall"].update(documents=59), ["a", "b", "c"]),
        (lambda r: r["target"].update(weights="another"), ["a", "b", "c"]),
    ],
)
def test_heads_are_ranked_only_where_they_can_be_compared(
    change: Callable[[dict[str, Any]], object], order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {label: copy.deepcopy(report_of("mtp", length)) for label, length in (("b", 1.5), ("a", 1.25), ("c", 1.75))}
    change(reports["b"])
    record = comparison("run", reports, {}, [])
    ranked = order[0] == "c"
    assert (list(record["heads"]), record["comparable"]) == (order, ranked)
    print_comparison(record)
    out = capsys.readouterr().out
    assert ("NOT comparable" in out) is not ranked
    assert out.startswith("note: The heads ") is bool(record["notes"])
    assert ("because they can't be compared" in acceptance(record).lede) is not ranked


def test_a_note_names_every_group() -> None:
    (note,) = notes(changed(lambda h: h["walk"].update(documents=59, generated_tokens=1)))
    tokens = report_of("mtp", 1.5)["walk"]["overall"]["generated_tokens"]
    assert note.endswith(f": 10 of 60 with {tokens:,} tokens (a, c); 10 of 59 with 1 tokens (b).")


DAMAGED = {
    "old": (json.dumps(report_of("mtp", 1.5) | {"schema": 2}), "has schema 2, not 3"),
    "none": ("{}", "has schema None, not 3"),
    "list": ("[]", "has schema None, not 3"),
    "cut": (json.dumps(report_of("mtp", 1.5))[:-9], "is damaged"),
    "bytes": ("\x00\x01", "is damaged"),
    "no-walk": (json.dumps(report_of("mtp", 1.5) | {"walk": None}), "is damaged (TypeError"),
    "no-kind": (json.dumps(report_of("mtp", 1.5) | {"head": {}}), "is damaged (KeyError: 'kind')"),
    "no-statistics": (json.dumps(report_of("mtp", 1.5) | {"engine": {"k": 3, "overall": {"drafts": 1}}}), "is damaged (KeyError"),
    "speed": (json.dumps(report_of("mtp", 1.5) | {"speed": {"rows": [{"method": "none"}]}}), "is damaged (KeyError"),
    "baselines": (json.dumps(report_of("mtp", 1.5) | {"baselines": {"ngram": {"k": 3}}}), "is damaged (KeyError"),
    "words": (json.dumps(report_of("mtp", 1.5) | {"training": "long"}), "is damaged (AttributeError"),
}


@pytest.mark.parametrize("label", DAMAGED)
def test_a_report_that_cannot_be_used_is_named_in_one_line_and_left_out(tmp_path: Path, label: str) -> None:
    run = write_run(tmp_path / "run", {"mtp": report_of("mtp", 1.5), label: {}})
    path = run / "heads" / label / "report/report.json"
    text, expected = DAMAGED[label]
    path.write_text(text, encoding="utf-8")
    record = compare_run(run)
    assert list(record["heads"]) == ["mtp"]
    (line,) = record["left_out"]
    assert line.startswith(f"{path} {expected}")
    assert "\n" not in line
    assert "mtptrain.validate" in line


def test_a_run_folder_is_read_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"mtp": report_of("mtp", 1.5), "eagle": report_of("eagle", 1.25)})
    (run / "heads/unfinished/train").mkdir(parents=True)
    write_export(run, "mtp", "vllm.unproven", {"proof": "reference"})
    write_export(run, "mtp", "sglang", {"proof": "contract"})
    write_export(run, "mtp", ".gguf.tmp", {"proof": "contract"})
    damaged = [write_export(run, "eagle", "vllm", "{"), write_export(run, "eagle", "hf", {"engine": "hf"})]
    record = compare_run(run)
    assert record["run"] == "run"
    assert record["target"] == report_of("mtp", 1.5)["target"]
    assert record["heads"]["mtp"]["exports"] == {"sglang": "contract", "vllm.unproven": "reference"}
    assert record["heads"]["eagle"]["exports"] == {}
    assert len(record["left_out"]) == 3
    assert f"{run / 'heads/unfinished'} has no report and is left out; run python -m mtptrain.validate" in record["left_out"][-1]
    for path in damaged:
        assert any(line.startswith(f"{path} is damaged") for line in record["left_out"])


def config(folder: Path, name: str = "run", label: str = "") -> Config:
    (cfg,) = cli.compose(["+recipe=tiny", "head=mtp", f"root='{folder}'", f"name={name}", *([f"head.label={label}"] if label else [])])
    return cfg


def test_the_job_writes_the_record_and_the_page_and_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = four_heads() | {"[bold]x\x1b[31m": report_of("mtp", 1.125)}
    run = write_run(tmp_path / "run", reports)
    write_export(run, "mtp", "vllm", {"proof": "engine"})
    compare.run(config(tmp_path))
    record = read_json(run / "comparison.json")
    assert record == compare_run(run)
    assert (run / "comparison.html").stat().st_size < 6_000_000
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    assert rows[0][:7] == [
        "eagle3",
        "engine",
        "10",
        "3",
        "2.000",
        "1.875 .. 2.250",
        f"{record['heads']['eagle3']['tokens_per_target_step']:.3f}",
    ]
    assert ["eagle3", "eagle3", "4,000,000", "9,500,000", "1,157", "300 s", "open", "-"] in rows
    assert ["mtp", "mtp", "4,000,000", "32,000,000", "1,157", "100 s", "open", "vllm: engine"] in rows
    assert ["eagle", "eagle", "4,000,000", "32,000,000", "1,157", "200 s", "shut", "-"] in rows
    assert ["mtp", "612.4", "2011.9", "4630.1"] in rows
    assert ["no speculation", "330.0", "1240.5", "4010.2"] in rows
    assert any(row[0] == "engine's own ngram" for row in rows)
    assert any(row[0].startswith("[bold]x␛[31m") for row in rows)
    assert "\x1b[31m" not in out


@pytest.mark.parametrize(("labels", "there"), [([], "there is none"), (["mtp"], "only mtp has one")])
def test_a_comparison_needs_two(tmp_path: Path, labels: list[str], there: str) -> None:
    write_run(tmp_path / "run", {label: report_of("mtp", 1.5) for label in labels})
    with pytest.raises(UserError, match=there) as error:
        compare.run(config(tmp_path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/comparison.json").exists()


def sweep(job: str, folder: Path, monkeypatch: pytest.MonkeyPatch, raised: dict[str, BaseException], *overrides: str) -> int:
    """The command line's exit status for a job whose work is to write a report, but for heads that raise."""

    def main(cfg: Config) -> None:
        label = cfg.head_dir.name
        write_run(cfg.run_dir, {label: report_of(cfg.head.kind.name, 1.5)})
        if label in raised:
            raise raised[label]

    monkeypatch.chdir(folder)
    return cli.run(main, job, ["+recipe=tiny", *overrides])


@pytest.mark.parametrize("job", ["train", "validate", "export"])
def test_a_sweep_ends_with_a_comparison(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(job, tmp_path, monkeypatch, {}, "-m", "head=mtp,eagle,eagle3") == 0
    assert set(read_json(tmp_path / "runs/tiny/comparison.json")["heads"]) == {"mtp", "eagle", "eagle3"}
    out = capsys.readouterr().out
    assert out.count("heads of tiny, each by its strongest measurement") == 1
    assert out.rstrip().endswith("compare: runs/tiny/comparison.html and comparison.json")


def test_every_run_folder_of_a_sweep_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep("train", tmp_path, monkeypatch, {}, "-m", "name=a,b", "head=mtp,eagle") == 0
    for name in ("a", "b"):
        assert set(read_json(tmp_path / "runs" / name / "comparison.json")["heads"]) == {"mtp", "eagle"}


@pytest.mark.parametrize(
    ("job", "overrides"),
    [
        ("train", ["head=mtp"]),
        ("train", ["-m", "head=mtp"]),
        ("train", ["-m", "name=a,b"]),
        ("prepare", ["-m", "head=mtp,eagle"]),
        ("precompute", ["-m", "head=mtp,eagle"]),
        ("plan", ["-m", "head=mtp,eagle"]),
    ],
)
def test_there_is_none_where_there_is_nothing_to_compare(
    job: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(job, tmp_path, monkeypatch, {}, *overrides) == 0
    assert list(tmp_path.rglob("comparison.*")) == []
    assert "strongest" not in capsys.readouterr().out


def test_a_single_run_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs/tiny", {"eagle": report_of("eagle", 1.5)})
    assert sweep("train", tmp_path, monkeypatch, {}, "head=mtp") == 0
    assert sorted(p.name for p in (tmp_path / "runs/tiny").iterdir()) == ["heads"]
    assert len(compare_run(tmp_path / "runs/tiny")["heads"]) == 2


def test_a_run_that_fails_hides_nothing_and_the_sweep_still_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised: dict[str, BaseException] = {"mtp": UserError("the gate is shut")}
    assert sweep("train", tmp_path, monkeypatch, raised, "-m", "head=mtp,eagle,eagle3") == 2
    assert set(read_json(tmp_path / "runs/tiny/comparison.json")["heads"]) == {"mtp", "eagle", "eagle3"}
    assert capsys.readouterr().err.count("the gate is shut") == 1


def test_a_bug_in_one_run_keeps_its_trace_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        sweep("train", tmp_path, monkeypatch, {"eagle": ZeroDivisionError()}, "-m", "head=mtp,eagle")
    assert set(read_json(tmp_path / "runs/tiny/comparison.json")["heads"]) == {"mtp", "eagle"}


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        ({label: UserError("no space") for label in ("mtp", "eagle")}, 2),
        ({"eagle": KeyboardInterrupt()}, 130),
    ],
)
def test_no_comparison_after_a_sweep_that_failed_whole_or_was_interrupted(
    raised: dict[str, BaseException], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep("train", tmp_path, monkeypatch, raised, "-m", "head=mtp,eagle") == status
    assert list(tmp_path.rglob("comparison.*")) == []


def test_a_damaged_report_of_another_head_does_not_fail_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs/tiny", {"old": report_of("mtp", 1.5) | {"schema": 2}})
    assert sweep("train", tmp_path, monkeypatch, {}, "-m", "head=mtp,eagle") == 0
    assert set(read_json(tmp_path / "runs/tiny/comparison.json")["heads"]) == {"mtp", "eagle"}
    assert capsys.readouterr().out.count("has schema 2, not 3") == 1


def test_it_needs_no_torch() -> None:
    code = "import sys, mtptrain.stages.compare\nprint('torch' in sys.modules, 'mtptrain.report.page' in sys.modules)"
    root = Path(cli.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False True\n"
