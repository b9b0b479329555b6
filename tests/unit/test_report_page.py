"""report.html: complete, true to report.json, self-contained, and deaf to what prompts say. No browser needed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from mtptrain.report import page
from mtptrain.report.figures import thinned
from mtptrain.report.page import report_page, write_report_page
from mtptrain.report.wording import percent
from tests.unit.parsed_page import Page, check_figures, check_it_loads_nothing, colours, contrast
from tests.unit.report_case import HOSTILE, full_report, minimal_report, training_log

SECTIONS = ["measurements", "depth", "training", "samples", "speed", "certificate", "serve", "about"]


Parsed = Callable[[dict[str, Any], list[dict[str, Any]]], Page]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return full_report()


@pytest.fixture(scope="module")
def html(report: dict[str, Any]) -> str:
    return report_page(report, training_log())


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    """Makes and reads a page in a fraction of the time, without plotly.js."""
    monkeypatch.setattr(page, "get_plotlyjs", lambda: "/* plotly.js */")
    return lambda report, log_rows: Page(report_page(report, log_rows))


@pytest.fixture(scope="module")
def full(html: str) -> Page:
    return Page(html)


def test_loads_nothing(full: Page) -> None:
    check_it_loads_nothing(full)


def test_hostile_text_stays_text(html: str, full: Page) -> None:
    assert HOSTILE not in html
    assert "<img" not in html.replace(get_plotlyjs(), "")
    assert full.row("depth", HOSTILE)
    assert full.row("certificate", HOSTILE)
    ticks = [t for f in full.figures for t in f["layout"].get("yaxis", {}).get("ticktext", [])]
    assert any(t.startswith("&lt;/script&gt;") for t in ticks)
    assert not any("<" in t for t in ticks)


def test_escape_sequences_and_other_control_characters_are_pictures(full: Page) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", full.text)
    assert "␛[31m" in full.text


def test_chips_are_the_tokens(full: Page, report: dict[str, Any]) -> None:
    pictures = str.maketrans({"\x1b": "␛", "\r": "␍"})
    for chips, sample in zip(full.chips, report["samples"], strict=True):
        expected = []
        for token in sample["tokens"]:
            if token["rejected"] is not None:
                expected.append(("del", token["rejected"].translate(pictures).replace("\n", "")))
            expected.append((token["fate"], token["text"].translate(pictures) or "▫"))
        assert chips == expected


def test_same_input_same_bytes(html: str) -> None:
    assert report_page(full_report(), training_log()) == html


def test_size_and_file(tmp_path: Path, html: str, report: dict[str, Any]) -> None:
    write_report_page(tmp_path / "report" / page.PAGE, report, training_log())
    written = (tmp_path / "report" / page.PAGE).read_bytes()
    assert written == html.encode()
    assert len(written) < 6_000_000


def test_all_sections(full: Page) -> None:
    assert full.sections == SECTIONS
    assert [a["href"] for t, a in full.tags if t == "a"] == [f"#{s}" for s in SECTIONS]
    assert len(full.figures) == sum(a.get("class") == "chart" for _, a in full.tags) == 9


def test_minimal_report(parsed: Parsed) -> None:
    found = parsed(minimal_report(), [])
    assert found.sections == ["measurements", "depth", "about"]
    assert found.row("measurements", "serving engine")[0] == "not measured"
    assert "gate" not in found.text


def test_an_empty_report_says_so(parsed: Parsed) -> None:
    found = parsed({}, [])
    assert found.sections == []
    assert "no draft was measured" in found.text


@pytest.mark.parametrize("key", sorted(full_report()))
@pytest.mark.parametrize("how", ["missing", "null"])
def test_every_key_may_be_absent(report: dict[str, Any], key: str, how: str, parsed: Parsed) -> None:
    rest = {k: v for k, v in report.items() if k != key} | ({key: None} if how == "null" else {})
    gone = {"samples": ["samples"], "speed": ["speed"], "serve": ["serve"]}.get(key, [])
    assert parsed(rest, training_log(100)).sections == [s for s in SECTIONS if s not in gone]


def test_sections_without_their_data(report: dict[str, Any], parsed: Parsed) -> None:
    rest = report | {"certificate": None, "expected_at_temperature_1": None, "training": None}
    assert parsed(rest, []).sections == ["measurements", "depth", "samples", "speed", "serve", "about"]


def test_headline_is_the_strongest_measurement(full: Page, report: dict[str, Any], parsed: Parsed) -> None:
    stats = report["engine"]["overall"]
    low, high = stats["mean_accepted_length_ci95"]
    assert f"{stats['mean_accepted_length']:.3f}accepted length" in re.sub(r"\n", "", full.text)
    assert f"95 % interval {low:.3f} – {high:.3f} · serving engine · 10 held-out documents" in full.text
    walk = report["walk"]["overall"]["mean_accepted_length"]
    without = parsed(report | {"engine": None, "reference": None}, [])
    assert f"{walk:.3f}accepted length" in re.sub(r"\n", "", without.text)


def test_measurements_are_of_the_same_documents(full: Page, report: dict[str, Any]) -> None:
    for name, label in (("walk", "offline walk"), ("reference", "reference decoder"), ("engine", "serving engine")):
        assert full.row("measurements", label) == measured(report["same_documents"][name])
    assert full.row("measurements", "offline walk, all documents") == measured(report["walk"])


def measured(measurement: dict[str, Any]) -> list[str]:
    s = measurement["overall"]
    low, high = s["mean_accepted_length_ci95"]
    return [
        f"{s['mean_accepted_length']:.3f}",
        f"{low:.3f} – {high:.3f}",
        f"{s['tokens_per_target_step']:.3f}",
        str(measurement["k"]),
        f"{s['drafts']:,}",
        str(s["documents"]),
    ]


def test_a_baseline_that_beats_the_head_is_shown_and_named(full: Page, report: dict[str, Any]) -> None:
    for name, label in (("ngram", "n-gram lookup"), ("draft_model", "draft model")):
        assert full.row("measurements", label) == measured(report["baselines"][name])
    assert "Draft model yields more than the head" in full.text
    assert "N-gram lookup yields more" not in full.text
    labels = full.figures[0]["layout"]["yaxis"]["ticktext"]
    assert labels == ["offline walk", "reference decoder", "serving engine", "n-gram lookup", "draft model"]


def test_depths_lengths_and_sources(full: Page, report: dict[str, Any]) -> None:
    stats = report["engine"]["overall"]
    assert full.row("depth", "serving engine: of all drafts") == [f"{100 * r:.1f} %" for r in stats["accept_rate_per_position"]]
    assert full.row("depth", "serving engine: of drafts that reached it") == [f"{100 * r:.1f} %" for r in stats["conditional_accept_rate"]]
    for k, m in report["by_k"].items():
        assert full.row("depth", f"K = {k}")[0] == f"{m['overall']['mean_accepted_length']:.3f}"
    code = report["walk"]["by_source"]["code"]
    assert full.row("depth", "code")[:2] == [str(code["documents"]), f"{code['mean_accepted_length']:.3f}"]
    near = report["walk"]["by_context"]["128"]
    expected = [str(near["documents"]), f"{near['drafts']:,}", f"{near['mean_accepted_length']:.3f}"]
    assert full.row("depth", "128 to 255")[:3] == expected
    bars = full.figures[1]["data"]
    assert [bar["y"] for bar in bars] == [stats["accept_rate_per_position"], stats["conditional_accept_rate"]]


def test_yields_of_a_draft_add_up(full: Page, report: dict[str, Any]) -> None:
    first, second, third = report["engine"]["overall"]["accept_rate_per_position"]
    shares = [1 - first, first - second, second - third, third]
    text = full.text.replace("\N{NO-BREAK SPACE}", " ")
    for tokens, share in enumerate(shares, 1):
        assert re.search(rf"\b{tokens}(?: \(the target's own\))?: {100 * share:.1f} %", text)


def test_speed_and_its_ratio_to_no_speculation(full: Page) -> None:
    assert full.row("speed", "this head, K = 3") == ["1", "2", "612.4", "1.86 ×", "1,024", "1.67"]
    assert full.figures[-1]["data"][0]["y"] == [330.0, 1240.5, 4010.2]


def test_certificate_never_rounds_to_all(full: Page) -> None:
    name = "drafted tokens, reference decoder and serving engine"
    assert full.row("certificate", name) == ["> 99.99 %", "97.31 %", "93,127", "2,501"]
    assert full.row("certificate", "the engine's target, with transformers'") == ["99.83 %", "99.71 %", "952", ""]
    assert full.row("certificate", "doc-0003") == ["71", "a tie", "0.0078"]
    assert full.row("certificate", "sampled draft") == ["2.254", "64.1 %", "60.7 %", "57.7 %"]


@pytest.mark.parametrize(
    ("value", "text"), [(1, "100 %"), (0, "0 %"), (0.9996, "> 99.9 %"), (0.0004, "< 0.1 %"), (0.5, "50.0 %"), (None, "–")]
)
def test_percent(value: float | None, text: str) -> None:
    assert percent(value).replace("\N{NO-BREAK SPACE}", " ") == text


def test_gate_in_words(full: Page, report: dict[str, Any], parsed: Parsed) -> None:
    assert "The gate is open" in full.text
    reasons = ["mean accepted length 1.100 is below validate.min_accepted_length=1.15"]
    shut = parsed(report | {"gate": {"open": False, "reasons": reasons}}, [])
    assert "The gate is shut" in shut.text
    assert reasons[0] in shut.text


def test_serving_command_is_exact(full: Page, report: dict[str, Any]) -> None:
    assert report["serve"] in full.text
    assert [a["data-copies"] for t, a in full.tags if t == "button"] == ["command"]


def test_training_curves(full: Page) -> None:
    log = training_log()
    walks = [r for r in log if "walk" in r]
    held_out, loss, match = full.figures[5:8]
    assert held_out["data"][0]["y"] == [r["walk"]["mean_accepted_length"] for r in walks]
    assert held_out["data"][0]["marker"]["symbol"].index("star") == [r["update"] for r in walks].index(2200)
    assert loss["data"][0]["y"] == [r["loss"] for r in log if "loss" in r]
    assert [t["name"] for t in match["data"]] == ["step 1", "step 2", "step 3"]


def test_a_loss_that_diverged_leaves_a_gap(report: dict[str, Any], parsed: Parsed) -> None:
    rows = [{"update": u, "loss": x, "match": [0.1]} for u, x in ((1, 2.0), (2, float("inf")), (3, float("nan")))]
    assert parsed({}, rows).figures[0]["data"][0]["y"] == [2.0, None, None]


def test_long_curves_are_thinned_but_keep_their_ends() -> None:
    rows = [{"update": u} for u in range(1, 100_002)]
    kept = thinned(rows)
    assert len(kept) < 1600
    assert (kept[0], kept[-1]) == (rows[0], rows[-1])


def test_figures_are_valid_to_plotly(full: Page) -> None:
    check_figures(full)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_legible(full: Page, dark: bool) -> None:
    c = colours(full.style, dark)
    used = {name for f in full.figures for name in re.findall(r'"--([a-z-]+)(?: [\d.]+)?"', json.dumps(f))}
    assert used - {"line"} <= set(c)
    text = [("ink", s) for s in ("bg", "panel", "plain", "chip-lo", "chip-hi")] + [("muted", s) for s in ("bg", "panel")]
    text += [(n, "panel") for n in ("head", "own", "good", "bad")]
    for name, surface in text:
        assert contrast(c[name], c[surface]) >= 4.5, (name, surface)
    for name in ("none", "head", "second", "ngram", "draft-model", "other", "extra", "line-lo", "line-hi"):
        assert contrast(c[name], c["panel"]) >= 3, name
