"""The notebooks run from top to bottom in an empty folder, and carry neither outputs nor paths of a machine."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from mtptrain.files import read_json

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["compare_heads.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_paths(path: Path) -> None:
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, set(notebook.metadata)) == (4, {"kernelspec", "language_info"})
    for cell in notebook.cells:
        assert not re.search(r"(?:^|[\s\"'=(])(?:/|~|[A-Z]:\\)\w", cell.source), cell.source
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count, cell.metadata) == ([], None, {})


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The folder in which compare_heads.ipynb was run, and each cell's outputs by its source."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        notebook = nbformat.read(ROOT / "notebooks/compare_heads.ipynb", nbformat.NO_CONVERT)
        client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
        client.execute()
    return folder, {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def outputs(cells: dict[str, list[Any]], part: str) -> list[Any]:
    """Of the one cell that contains `part`."""
    (found,) = [out for source, out in cells.items() if part in source]
    return found


def test_it_ends_with_three_heads_in_one_table(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, cells = ran
    (table,) = outputs(cells, "pd.DataFrame")
    for kind in ("mtp", "eagle", "eagle3"):
        report = read_json(folder / "runs/tiny/heads" / kind / "report/report.json")
        length = report["reference"]["overall"]["mean_accepted_length"]
        assert re.search(
            rf"<th>{kind}</th>\s*<td>{kind}</td>\s*<td>3</td>\s*<td>reference</td>\s*<td>2</td>\s*<td>{length:.6f}</td>",
            table.data["text/html"],
        )


def test_the_figure_is_drawn_from_the_reports(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, cells = ran
    (figure,) = outputs(cells, "go.Scatter")
    (trace,) = figure.data["application/vnd.plotly.v1+json"]["data"]
    assert set(trace["x"]) == {"mtp", "eagle", "eagle3"}
    for kind, length, above in zip(trace["x"], trace["y"], trace["error_y"]["array"], strict=True):
        stats = read_json(folder / "runs/tiny/heads" / kind / "report/report.json")["reference"]["overall"]
        assert length == stats["mean_accepted_length"]
        assert length + above == pytest.approx(stats["mean_accepted_length_ci95"][1], abs=1e-12)  # a difference, added again


def test_it_shows_the_report_and_its_certificate(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, cells = ran
    (frame,) = outputs(cells, "IFrame(")
    source = re.search(r'src="([^"]+)"', frame.data["text/html"])
    assert source
    assert (folder / source[1]).is_file()
    (certificate,) = outputs(cells, '["certificate"]')
    assert "'between': ['walk', 'reference']" in certificate.data["text/plain"]


def test_it_writes_out_the_drafts_of_an_answer(ran: tuple[Path, dict[str, list[Any]]]) -> None:
    _, cells = ran
    (printed,) = outputs(cells, "draft.accepted :]")
    title, *lines = printed.text.splitlines()
    assert title.endswith(", K = 3")
    assert lines
    for line in lines:
        found = re.match(r"after (?:'.*?'|\".*?\"): (\d) accepted (?:'(.*?)'|\"(.*?)\")(, then .* where the target has .*)?$", line)
        assert found, line
        assert found[1] != "0" or not (found[2] or found[3])
        assert found[4] or found[1] != "0", "a draft of which nothing was accepted has a token that was not"
    assert any(line[line.index(": ") + 2] != "0" for line in lines)
