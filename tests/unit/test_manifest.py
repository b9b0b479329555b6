"""What a changed input is called, and when a stage is reused, refused or redone."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtptrain import manifest
from mtptrain.config import OnStale
from mtptrain.errors import StaleError, UserError
from mtptrain.files import read_json, write_atomic, write_text


def test_differences_are_named_by_dotted_key() -> None:
    old = {"seed": 0, "head": {"norms": {"embed": True, "output": True}}, "gone": 1}
    new = {"seed": 0, "head": {"norms": {"embed": False, "output": True}}, "new": [2]}
    assert manifest.changed_inputs(old, new) == [
        "gone: 1 -> '(absent)'",
        "head.norms.embed: True -> False",
        "new: '(absent)' -> [2]",
    ]


def test_reused_refused_redone(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    assert not manifest.is_complete(folder, {"a": 1}, OnStale.error)
    manifest.begin(folder, {"a": 1})
    assert not manifest.is_complete(folder, {"a": 1}, OnStale.error)
    with pytest.raises(StaleError, match="a: 1 -> 2"):
        manifest.is_complete(folder, {"a": 2}, OnStale.error)
    manifest.finish(folder, {"a": 1}, {"rows": 3})
    assert manifest.is_complete(folder, {"a": 1}, OnStale.error)
    assert manifest.require(folder, "the stage", "a command")["results"] == {"rows": 3}
    assert not manifest.is_complete(folder, {"a": 2}, OnStale.redo)
    assert not folder.exists()


def test_a_missing_stage_names_its_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the store is missing or unfinished in .*; make it with: python -m mtptrain\.precompute"):
        manifest.require(tmp_path, "the store", "python -m mtptrain.precompute")


def test_fault_16_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / manifest.MANIFEST).write_text('{"inputs": {')
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        manifest.is_complete(tmp_path, {}, OnStale.error)


@pytest.mark.parametrize("damage", ['{"inputs": {', "[]", "{}", '{"inputs": 3}'])
def test_fault_16_redo_gets_past_a_damaged_manifest(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "stage"
    folder.mkdir()
    (folder / manifest.MANIFEST).write_text(damage)
    with pytest.raises(UserError, match="damaged"):
        manifest.is_complete(folder, {}, OnStale.error)
    assert not manifest.is_complete(folder, {}, OnStale.redo)
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["[]", "{}", '{"inputs": {}}', '{"inputs": {}, "results": 3}'])
def test_fault_16_a_manifest_of_another_form_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / manifest.MANIFEST).write_text(damage)
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        manifest.require(tmp_path, "the store", "python -m mtptrain.precompute")


@pytest.mark.parametrize("changed", ['"a": 2', '"documents": 9', '"mtptrain": "9.9"'])
def test_fault_16_a_manifest_that_was_changed_is_named(tmp_path: Path, changed: str) -> None:
    """One value is another, everything else as it was written."""
    folder = tmp_path / "stage"
    manifest.finish(folder, {"a": 1}, {"documents": 3})
    file = folder / manifest.MANIFEST
    key = changed.partition(":")[0]
    edited = re.sub(rf"{key}: [^,\n]+", changed, file.read_text())
    assert edited != file.read_text()
    file.write_text(edited)
    with pytest.raises(UserError, match=r"manifest\.json is damaged or was changed \(its hash differs\); delete it, then"):
        manifest.require(folder, "the store", "python -m mtptrain.precompute")
    with pytest.raises(UserError, match="its hash differs"):
        manifest.is_complete(folder, {"a": 1}, OnStale.error)


def test_fault_16_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_text(path, "old")

    def fills_the_disk(tmp: Path) -> None:
        tmp.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomic(path, fills_the_disk)
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def test_a_missing_file_of_ours_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"report\.json is missing; python -m mtptrain\.validate"):
        read_json(tmp_path / "report/report.json")


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    """The second is told so; after the first was killed, it may begin."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom mtptrain import manifest\n"
        "manifest.begin(Path(sys.argv[1]), {'a': 1})\nprint('begun', flush=True)\ntime.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    with pytest.raises(UserError, match="another process is at work in"):
        manifest.begin(tmp_path / "s", {"a": 1})
    with pytest.raises(UserError, match="another process is at work in"):
        manifest.is_complete(tmp_path / "s", {"a": 2}, OnStale.redo)
    child.kill()
    child.wait()
    manifest.begin(tmp_path / "s", {"a": 1})
    manifest.finish(tmp_path / "s", {"a": 1}, {})
    manifest.begin(tmp_path / "s", {"a": 1})
    manifest.finish(tmp_path / "s", {"a": 1}, {})
