"""comparison.html: true to comparison.json, self-contained, and deaf to what labels and sources say. No browser needed."""

import json
import re
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from mtptrain.report import page
from mtptrain.report.comparison import comparison
from mtptrain.report.comparison_page import comparison_page
from mtptrain.report.plotting import label_text
from tests.unit.comparison_case import four_heads
from tests.unit.parsed_page import Page, check_figures, check_it_loads_nothing, colours
from tests.unit.report_case import HOSTILE, minimal_report

SECTIONS = ["acceptance", "depth", "cost", "speed", "exports"]
STRANGE = HOSTILE.replace("/", "_")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    exports = {"mtp": {"vllm": "engine", "sglang": "contract"}}
    return comparison("smollm2", four_heads(), exports, [f"runs/{HOSTILE} is damaged"])


@pytest.fixture(scope="module")
def html(record: dict[str, Any]) -> str:
    return comparison_page(record)


@pytest.fixture(scope="module")
def full(html: str) -> Page:
    return Page(html)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "get_plotlyjs", lambda: "/* plotly.js */")


def test_loads_nothing(full: Page) -> None:
    check_it_loads_nothing(full)


def test_figures_are_valid_to_plotly_and_named_colours_exist(full: Page) -> None:
    check_figures(full)
    used = {name for f in full.figures for name in re.findall(r'"--([a-z-]+)"', json.dumps(f))}
    assert used <= set(colours(full.style, dark=False))
    assert used >= {"head", "draft-model", "other", "extra", "ngram", "none"}


def test_hostile_labels_and_sources_stay_text(html: str, full: Page) -> None:
    for text in (HOSTILE, STRANGE):
        assert text not in html
    assert "<img" not in html.replace(get_plotlyjs(), "")
    for section in SECTIONS:
        assert full.row(section, STRANGE), section
    assert full.row("acceptance", HOSTILE)
    assert f"runs/{HOSTILE} is damaged" in full.text
    shown = [t["name"] for f in full.figures for t in f["data"]] + full.figures[0]["layout"]["yaxis"]["ticktext"]
    shown += [t["hovertemplate"].removesuffix("<extra></extra>") for f in full.figures for t in f["data"]]
    assert any(name.startswith("&lt;_script&gt;") for name in shown)
    assert not any("<" in text for text in shown)


def test_same_input_same_bytes(html: str, record: dict[str, Any]) -> None:
    assert comparison_page(record) == html


def test_sections_and_headline(full: Page) -> None:
    assert full.sections == SECTIONS
    text = full.text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Heads of smollm2 for models/SmolLM2-135M-Instruct" in text
    assert "llama · 4 heads · drafts of K = 3 tokens · serving engine" in text


def test_acceptance_is_the_records(full: Page, record: dict[str, Any]) -> None:
    for label, head in record["heads"].items():
        low, high = head["mean_accepted_length_ci95"]
        assert full.row("acceptance", label) == [
            head["kind"],
            "3",
            "serving engine",
            f"{head['mean_accepted_length']:.3f}",
            f"{low:.3f} – {high:.3f}",
            f"{head['tokens_per_target_step']:.3f}",
            "10",
            f"{head['walk']['mean_accepted_length']:.3f}",
            "60",
        ]
        assert full.row("depth", label) == [
            *(f"{100 * r:.1f} %" for r in head["conditional_accept_rate"]),
            "",
        ]  # another method drafts four
    labels = [row[0] for row in full.tables["acceptance"]]
    assert labels[1:7] == ["eagle3", "mtp", STRANGE, "eagle", "n-gram lookup", "draft model"]
    ngram = record["baselines"]["ngram"]
    assert full.row("acceptance", "n-gram lookup")[:4] == ["", "3", "serving engine", f"{ngram['mean_accepted_length']:.3f}"]


def test_sources_by_head(full: Page, record: dict[str, Any]) -> None:
    rows = [[c.replace("\N{NO-BREAK SPACE}", " ") for c in row] for row in full.tables["acceptance"] if row[0] == "code"]
    code = record["heads"]["mtp"]["by_source"]["code"]
    low, high = code["mean_accepted_length_ci95"]
    assert [row[1] for row in rows] == [*record["heads"], "n-gram lookup", "draft model"]
    expected = [f"{code['mean_accepted_length']:.3f}", f"{low:.3f} – {high:.3f}", f"{code['tokens_per_target_step']:.3f}", "2"]
    assert rows[1] == ["code", "mtp", *expected]
    assert len([row for row in full.tables["acceptance"] if row[0] == "maths"]) == 4  # the other methods have no such documents


def test_first_figure_has_every_source_of_every_head(full: Page, record: dict[str, Any]) -> None:
    figure = full.figures[0]
    names = ["all documents", *sorted(record["heads"]["mtp"]["by_source"])]
    assert figure["layout"]["yaxis"]["ticktext"] == [label_text(name) for name in names]
    assert [t["name"] for t in figure["data"]] == [*map(label_text, record["heads"]), "n-gram lookup", "draft model"]
    mtp = figure["data"][1]
    assert mtp["x"] == [record["heads"]["mtp"]["mean_accepted_length"]] + [
        record["heads"]["mtp"]["by_source"][source]["mean_accepted_length"] for source in names[1:]
    ]
    assert (mtp["x"][0], mtp["error_x"]["arrayminus"][0], mtp["error_x"]["array"][0]) == (1.5, 0.125, 0.25)
    assert mtp["y"] == [-7 * group - 1 for group in range(6)]  # six series and a gap
    ngram = figure["data"][4]
    assert ngram["y"] == [-7 * names.index(source) - 4 for source in ("all documents", "chat", "code")]
    taken = [y for trace in figure["data"] for y in trace["y"]]
    assert len(set(taken)) == len(taken)
    assert len({(t["marker"]["color"], t["marker"]["symbol"]) for t in figure["data"]}) == 6
    assert [t["marker"]["symbol"] for t in figure["data"]] == ["circle", "square", "diamond", "triangle-up", "circle-open", "circle-open"]
    low, high = figure["layout"]["yaxis"]["range"]
    assert all(low < y < high for y in taken)


def test_what_it_takes(full: Page, record: dict[str, Any]) -> None:
    cells = ["4,000,000", "9,500,000", "8,000", "after_1, after_14, after_26", "1,157", "3,125,656", "5 min 0 s"]
    assert full.row("cost", "eagle3") == cells
    work, training = full.figures[1:3]
    assert {t["name"]: (t["x"], t["y"]) for t in work["data"]}["eagle3"] == ([9_500_000], [2.0])
    assert {t["name"]: (t["x"], t["y"]) for t in training["data"]}["eagle"] == ([200.0], [1.25])
    ngram = record["baselines"]["ngram"]["mean_accepted_length"]
    for figure in (work, training):
        (line,) = figure["layout"]["shapes"]
        assert line["y0"] == line["y1"] == ngram
        low, high = figure["layout"]["yaxis"]["range"]
        assert low < ngram < high


def test_speed_against_no_speculation_of_the_same_report(full: Page) -> None:
    assert full.row("speed", "mtp") == ["1", "612.4", "1.86 ×"]
    assert full.row("speed", "eagle3") == ["1", "1,837.2", "5.57 ×"]
    assert full.row("speed", "no speculation") == ["1", "330.0", "1.00 ×"]
    bars = {t["name"]: t for t in full.figures[-1]["data"]}
    assert bars["mtp"]["y"] == [612.4, 2011.9, 4630.1]
    assert len({(t["marker"]["color"], t["marker"]["pattern"]["shape"]) for t in bars.values()}) == len(bars) == 7


def test_gates_and_exports(full: Page) -> None:
    assert full.row("exports", "mtp") == ["open", "vllm (engine), sglang (contract)"]
    assert full.row("exports", "eagle") == ["shut: mean accepted length 1.250 is below validate.min_accepted_length=1.3", "–"]


def test_notes_and_better_baselines_are_said(full: Page, record: dict[str, Any]) -> None:
    assert "Draft model yields more than eagle3, mtp" in full.text
    assert "N-gram lookup yields more" not in full.text
    assert record["notes"] == []


@pytest.mark.usefixtures("quick")
def test_what_keeps_heads_from_being_compared_is_on_the_page() -> None:
    reports = four_heads()
    reports["mtp"]["k"] = 5
    record = comparison("run", reports, {}, [])
    found = Page(comparison_page(record))
    assert len(record["notes"]) == 1
    assert record["notes"][0] in found.text
    assert "drafts of K" not in found.text


@pytest.mark.usefixtures("quick")
def test_heads_without_engine_cost_or_gate() -> None:
    nothing = minimal_report()
    nothing["walk"]["overall"] |= {"mean_accepted_length": None, "mean_accepted_length_ci95": None, "tokens_per_target_step": None}
    found = Page(comparison_page(comparison("run", {"a": minimal_report(), "b": nothing}, {}, [])))
    assert found.sections == ["acceptance", "depth", "cost", "exports"]
    assert found.row("acceptance", "b")[3:6] == ["–", "–", "–"]
    assert found.row("cost", "a") == ["–"] * 7
    assert found.row("exports", "a") == ["–", "–"]
    assert len(found.figures) == 1  # nothing to draw lengths against


@pytest.mark.usefixtures("quick")
def test_labels_of_a_sweep_keep_the_end_that_tells_them_apart() -> None:
    labels = [f"eagle3-train.loss.step_decay=0.{n}" for n in range(5, 9)]
    record = comparison("run", {label: minimal_report() for label in labels}, {}, [])
    names = [t["name"] for t in Page(comparison_page(record)).figures[0]["data"]]
    assert names == [f"eagle3-train.…step_decay=0.{n}" for n in range(5, 9)]
