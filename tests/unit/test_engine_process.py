"""The engine's process without an engine: a stand-in worker that crashes, hangs, lies or is missing."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mtptrain.config import Config, EngineConfig
from mtptrain.engines import process
from mtptrain.engines.process import Engine, find_engine, require_engine, run_engine
from mtptrain.errors import UserError

OURS = Engine(sys.executable, {"vllm": "0.32.0"})


def worker(tmp_path: Path, body: str) -> Engine:
    """A Python that runs `body` in the job's folder instead of the worker; `say(row)` appends to the results."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\nos.chdir(sys.argv[3])\n"
        "def say(**row):\n    with open('results.jsonl', 'a') as f: f.write(json.dumps(row) + '\\n')\n" + body
    )
    script.chmod(0o755)
    return Engine(str(script), {})


def rows(tmp_path: Path, body: str, **engine: Any) -> list[dict[str, Any]]:
    cfg = Config(engine=EngineConfig(**engine))
    return list(run_engine(cfg, worker(tmp_path, body), tmp_path / "job", {"a": {"kind": "x"}}, [{"id": "1"}]))


def test_rows_come_in_order_and_the_job_is_laid_out(tmp_path: Path) -> None:
    found = rows(
        tmp_path,
        "say(job='a', event='saw', jobs=json.load(open('jobs.json')), requests=open('requests.jsonl').read())\n"
        "say(job='a', event='path', path=os.environ['PYTHONPATH'], linked=sorted(os.listdir('site')))\nsay(job='a', event='all done')",
    )
    assert found[0]["jobs"] == {"a": {"kind": "x"}}
    assert found[0]["requests"] == '{"id": "1"}\n'
    assert found[1]["path"] == str((tmp_path / "job" / "site").resolve())
    assert found[1]["linked"][0] == "mtptrain"
    assert not (tmp_path / "job" / "site").exists()


def test_a_crash_is_one_line_with_status_and_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ended with status 7 before its work was done \(log: .*engine\.log\)"):
        rows(tmp_path, "print('boom'); sys.exit(7)")
    assert "boom" in (tmp_path / "job" / "engine.log").read_text()


def test_an_error_row_is_told_with_the_name_of_its_job(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"failed in its a run: no memory \(log"):
        rows(tmp_path, "say(job='a', event='error', message='no memory'); time.sleep(60)")


def test_a_hang_ends_after_the_timeout_with_everything_it_started(tmp_path: Path) -> None:
    body = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nsay(job='a', event='child', pid=child.pid)\ntime.sleep(600)"
    began = time.monotonic()
    with pytest.raises(UserError, match=r"reported nothing for engine\.timeout=1 s"):
        rows(tmp_path, body, timeout=1.0)
    assert time.monotonic() - began < 20
    pid = json.loads((tmp_path / "job" / "results.jsonl").read_text().splitlines()[0])["pid"]
    while is_running(pid):  # killed already: a busy kernel takes its time to end it
        assert time.monotonic() - began < 20
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_slow_engine_that_reports_is_not_ended(tmp_path: Path) -> None:
    body = "for i in range(4):\n    time.sleep(0.5); say(job='a', event='row', i=i)\nsay(job='a', event='all done')"
    assert [r["i"] for r in rows(tmp_path, body, timeout=1.4)] == [0, 1, 2, 3]


def test_a_torn_row_waits_for_its_rest(tmp_path: Path) -> None:
    body = (
        "f = open('results.jsonl', 'a')\nf.write('{\"job\": \"a\", '); f.flush(); time.sleep(0.3)\n"
        "f.write('\"event\": \"x\"}\\n'); f.flush(); say(job='a', event='all done')"
    )
    assert rows(tmp_path, body) == [{"job": "a", "event": "x"}]


def test_closing_early_ends_the_process(tmp_path: Path) -> None:
    engine = worker(tmp_path, "say(job='a', event='pid', pid=os.getpid()); time.sleep(600)")
    events = run_engine(Config(), engine, tmp_path / "job", {"a": {}}, [])
    pid = next(events)["pid"]
    events.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_real_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """kill -9 of the parent closes the pipe; a worker that only waits must not outlive it."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom mtptrain.engines import vllm_worker as w\n"
        "w._end_with_parent()\nprint('up', flush=True)\ntime.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.stdin.close()
    assert child.wait(20) == -9


def test_a_missing_engine_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_probe", lambda python, strict: {})
    assert find_engine(Config()) is None
    with pytest.raises(UserError, match=r"precompute\.backend=vllm needs vLLM.*tools/setup_engine.*engine\.python"):
        require_engine(Config(), "precompute.backend=vllm")
    assert find_engine(Config(engine=EngineConfig(python="none"))) is None


def test_a_named_python_must_run_and_have_vllm(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.python=/no/python: this Python can't be run"):
        find_engine(Config(engine=EngineConfig(python="/no/python")))
    bare = worker(tmp_path, "").python
    Path(bare).write_text("#!/bin/sh\necho '{}'\n")
    with pytest.raises(UserError, match="it has no vLLM"):
        find_engine(Config(engine=EngineConfig(python=bare)))


@pytest.mark.parametrize(("version", "any_version", "ok"), [("0.32.1", False, True), ("0.9.0", False, False), ("0.9.0", True, True)])
def test_an_untested_version_is_refused_unless_asked_for(tmp_path: Path, version: str, any_version: bool, ok: bool) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{json.dumps({'vllm': version})}'\n")
    script.chmod(0o755)
    cfg = Config(engine=EngineConfig(python=str(script), any_version=any_version))
    if ok:
        assert find_engine(cfg) == Engine(str(script), {"vllm": version})
    else:
        with pytest.raises(UserError, match=r"has vLLM 0\.9\.0.*engine\.any_version=true"):
            find_engine(cfg)


def test_auto_finds_the_environment_of_setup_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = tmp_path / ".venv-engine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho \'{"vllm": "0.32.0"}\'\n')
    python.chmod(0o755)
    found = find_engine(dataclasses.replace(Config()))
    assert found is not None
    assert found.python in (str(python), sys.executable)
