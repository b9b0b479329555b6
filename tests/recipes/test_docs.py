"""Every `python -m mtptrain...` and `tools/...` command in the documentation: the first compose, the second exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mtptrain import cli, usage
from mtptrain.store.__main__ import parser as store_parser

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [p for p in ROOT.rglob("README.md") if not {".venv", ".venv-engine", "runs"} & set(p.parts)]


def documented() -> list[str]:
    """Command lines of all fenced blocks, comments cut off."""
    lines = [
        line
        for p in DOCUMENTS
        for block in re.findall(r"```\w*\n(.*?)```", p.read_text(encoding="utf-8"), re.S)
        for line in block.splitlines()
    ]
    lines = [re.sub(r"^(torchrun|srun) .*?-m mtptrain", "python -m mtptrain", line) for line in lines]
    return sorted(
        {
            line.split(" #")[0].strip()
            for line in lines
            if line.startswith(("python -m mtptrain", "tools/", "python tools/", "python3 tools/"))
        }
    )


JOBS = [c for c in documented() if c.startswith("python -m mtptrain")]
TOOLS = [c for c in documented() if not c.startswith("python -m mtptrain")]


def test_there_are_commands() -> None:
    assert len(JOBS) >= 6
    assert {"tools/demo", "tools/test"} <= {c.split()[0] for c in TOOLS}


@pytest.mark.parametrize("command", JOBS)
def test_a_documented_job_composes(command: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\n# Mine\nname: mine\n")
    words = shlex.split(command.replace("DIR", str(tmp_path)))[2:]
    if words[0] == "mtptrain.store":
        assert callable(store_parser().parse_args(words[1:]).job)
        return
    assert words[0].removeprefix("mtptrain.") in usage.JOBS
    if "-m" in words:
        assert len(cli.compose([w for w in words[1:] if w != "-m"], multirun=True)) > 1
        return
    if "--help" not in words and "--cfg" not in words:
        words += ["--cfg", "job"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", TOOLS)
def test_a_documented_tool_is_there(command: str) -> None:
    word = next(w for w in shlex.split(command) if w.startswith("tools/"))
    assert (ROOT / word).exists()
    if word.endswith(".py"):
        done = subprocess.run([sys.executable, word, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr
