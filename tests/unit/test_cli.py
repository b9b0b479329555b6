"""The command line: one line for every mistake, sweeps that do not overwrite one another, nothing written where it isn't expected."""

import errno
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtptrain import cli, usage
from mtptrain.config import Config
from mtptrain.errors import UserError
from mtptrain.store.format import StoreDamage


class Calls:
    """A job's main that notes the configs it is given."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.configs: list[Config] = []
        self.raises = raises

    def __call__(self, cfg: Config) -> None:
        self.configs.append(cfg)
        if self.raises is not None:
            raise self.raises


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MTPTRAIN_TRACE", raising=False)


MISTAKES = [
    ("data.train=prompts.jsonl", "error: data.train=prompts.jsonl: takes a list; write data.train=[prompts.jsonl]"),
    ("+recipe=smolm2", "error: recipe=smolm2: no such recipe; near: smollm2"),
    (
        "+recipe=zzzz",
        "error: recipe=zzzz: no such recipe; there are: deepseek-v2-lite, llama1b, llama70b, llama8b, qwen3-8b, smollm2, tiny",
    ),
    (
        "+recipe",
        "error: +recipe: name the recipe, +recipe=NAME; there are: deepseek-v2-lite, llama1b, llama70b, llama8b, qwen3-8b, smollm2, tiny",
    ),
    ("tiny", "error: tiny: a recipe is given as +recipe=tiny"),
    ("+recip=tiny", "error: recip: no such option; near: +recipe"),
    ("train.lrr=1", "error: train.lrr: no such option; near: train.optim.lr"),
    ("+train.lrr=1", "error: train.lrr: no such option; near: train.optim.lr"),
    ("~train.lrr", "error: train.lrr: no such option; near: train.optim.lr"),
    ("trian.steps=1", "error: trian.steps: no such option; near: train.steps"),
    ("head=mpt", "error: head=mpt: no such head; near: mtp"),
    ("head=eagl", "error: head=eagl: no such head; near: eagle, eagle3, eagle3.1"),
    ("head.kind=eagle3.1", "error: head.kind=eagle3.1: eagle3.1 is a kind with options of its own; write head=eagle3.1"),
    ("head.fc_bias=true", "error: head.fc_bias=True: head.kind=eagle3 has none"),
    ("heads=mtp", "error: heads: no such option; near: head"),
    ("train.optim.schedule=cosin", "error: train.optim.schedule=cosin: no such choice; near: cosine"),
    ("train.steps=abc", "error: train.steps=abc: Value 'abc' of type 'str' could not be converted to Integer"),
    ("train.steps=", "error: train.steps=: Value '' of type 'str' could not be converted to Integer"),
    ("train.steps", "error: train.steps: an override is key=value; it needs a value"),
    ("data.limit=1.5", "error: data.limit=1.5: Value '1.5' of type 'float' could not be converted to Integer"),
    ("train.steps=99", "error: train.steps=99: must be at most 16"),
    (
        "engine.options={quantization:fp8}",
        "error: engine.options.quantization: a key that is not there yet is added with a plus: +engine.options.quantization=VALUE",
    ),
    ("export.engines=[foo]", "error: export.engines=[foo]: no such choice; there are: vllm, sglang, trtllm, gguf, hf"),
    ("export.engines=[hf,hf]", "error: export.engines=['hf', 'hf']: names an engine twice"),
    ("validate.batch_sizes=[1,16,1]", "error: validate.batch_sizes=[1, 16, 1]: names a size twice"),
    ("data.train=[a", "error: data.train=[a: not a valid override"),
    ("--recipe", "error: --recipe: no such flag (see --help); a recipe is given as +recipe=NAME"),
    ("--config-dir=nowhere", "error: --config-dir nowhere: no such folder; it should hold recipe/NAME.yaml"),
]


@pytest.mark.parametrize(
    ("flags", "mistake", "expected"),
    [([], *m) for m in MISTAKES]
    + [
        (flags, *m)
        for flags in (["-m"], ["--cfg", "job"])
        for m in MISTAKES
        if m[0] in ("+recipe=smolm2", "+train.lrr=1", "train.steps=abc")
    ],
)
def test_a_mistake_gets_one_line_and_nothing_runs(
    flags: list[str], mistake: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = Calls()
    assert cli.run(main, "train", [*flags, mistake]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(expected)
    assert err.count("\n") == 1
    assert out == ""
    assert main.configs == []
    assert list(Path.cwd().iterdir()) == []


def test_a_mistake_in_the_last_run_of_a_sweep_stops_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    main = Calls()
    assert cli.run(main, "train", ["-m", "train.steps=1,2,17"]) == 2
    assert capsys.readouterr().err == "error: train.steps=17: must be at most 16\n"
    assert main.configs == []


def test_several_values_without_a_sweep_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(Calls(), "train", ["train.steps=1,2"]) == 2
    assert capsys.readouterr().err == "error: train.steps=1,2: several values are a sweep and need -m; a list is written 'key=[a,b]'\n"


def test_two_recipes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(Calls(), "train", ["+recipe=tiny", "+recipe=smollm2"]) == 2
    assert capsys.readouterr().err.startswith("error: +recipe is given twice")


def test_the_job_gets_recipe_and_overrides_as_typed_config() -> None:
    main = Calls()
    assert cli.run(main, "train", ["+recipe=tiny", "train.steps=2", "name=mine"]) == 0
    (cfg,) = main.configs
    assert (cfg.name, cfg.train.steps, cfg.target.path, cfg.target.shape["hidden_size"]) == ("mine", 2, "tiny:", 64)
    assert list(Path.cwd().iterdir()) == []


def test_flags_may_stand_anywhere() -> None:
    main = Calls()
    assert cli.run(main, "train", ["train.steps=1,2", "-m", "seed=3"]) == 0
    assert [(c.train.steps, c.seed) for c in main.configs] == [(1, 3), (2, 3)]


def test_user_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(Calls(UserError("data.train=x: no such file")), "train", []) == 2
    assert capsys.readouterr().err == "error: data.train=x: no such file\n"


def test_trace_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPTRAIN_TRACE", "1")
    assert cli.run(Calls(UserError("no such file")), "train", []) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: no such file\n")


def test_interruption_says_that_it_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(Calls(KeyboardInterrupt()), "train", []) == 130
    assert capsys.readouterr().err == "interrupted; the same command continues where it stopped\n"


@pytest.mark.parametrize(
    ("code", "text"), [(errno.ENOSPC, "No space left on device"), (errno.EACCES, "Permission denied"), (errno.EISDIR, "Is a directory")]
)
def test_fault_16_a_full_or_forbidden_disk_is_one_line(capsys: pytest.CaptureFixture[str], code: int, text: str) -> None:
    assert cli.run(Calls(OSError(code, text, "runs/x")), "train", ["+recipe=tiny"]) == 2
    assert capsys.readouterr().err.startswith(f"error: runs/x: {text}; ")


def test_other_system_errors_keep_their_trace() -> None:
    with pytest.raises(OSError, match="Broken pipe"):
        cli.run(Calls(OSError(errno.EPIPE, "Broken pipe")), "train", ["+recipe=tiny"])


def test_a_sweep_does_not_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(Calls(), "train", ["-m", "+recipe=tiny", "train.steps=1,2", "--cfg", "job"]) == 2
    assert "goes with none of --cfg" in capsys.readouterr().err


def test_a_bug_keeps_its_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.run(Calls(ZeroDivisionError()), "train", [])


def test_every_failing_run_of_a_sweep_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main = Calls(UserError("disk full"))
    assert cli.run(main, "train", ["-m", "train.steps=1,2"]) == 2
    err = capsys.readouterr().err
    assert len(main.configs) == 2
    assert "error: [train.steps=1] disk full\n" in err
    assert "error: [train.steps=2] disk full\n" in err
    assert "Error executing job" not in err
    assert "runs failed" not in err  # nothing else to see past them


def test_a_sweep_ends_with_how_many_of_its_runs_failed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def main(cfg: Config) -> None:
        if cfg.train.steps == 2:
            raise UserError("disk full")

    monkeypatch.setattr("mtptrain.stages.compare.after_sweep", lambda _: None)
    assert cli.run(main, "train", ["-m", "+recipe=tiny", "train.steps=1,2,3"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: 1 of 3 runs failed, each with its line above")


SWEEPS = [
    (["train.steps=1,3"], 1, 2),
    (["head=mtp", "head.norms.input=true,false", "validate.k=2"], 1, 2),
    (["head=mtp", "train.optim.lr=1e-3,2e-3"], 1, 2),
    (["head=mtp,eagle,eagle3,eagle3.1"], 1, 4),
    (["head=mtp,eagle", "head.label=mine"], 1, 2),
    (["head=eagle3,eagle3.1", "train.steps=3,7"], 1, 4),
    (["seed=0,1"], 2, 2),
    (["+recipe=tiny,smollm2"], 2, 2),
    (["data.responses.max_new_tokens=8,16", "train.steps=1,2"], 2, 4),
    (["precompute.captures=[final],[final,after_1]"], 2, 2),
    (["name=a,b"], 2, 2),
    (["name=a,b", "seed=0,1"], 4, 4),
    (["head.label=a,b"], 1, 2),
    (["root=x,y"], 2, 2),
    (["target.path=org/a,org_a"], 2, 2),
    (["store.shard_tokens=4096,8192", "on_stale=redo"], 2, 2),
]


@pytest.mark.parametrize(("overrides", "runs", "heads"), SWEEPS)
def test_sweeps_do_not_overwrite_one_another(overrides: list[str], runs: int, heads: int) -> None:
    configs = cli.compose(overrides, multirun=True)
    assert len({c.run_dir for c in configs}) == runs
    assert len({c.head_dir for c in configs}) == heads == len(configs)
    for key in ("data_dir", "store_dir"):
        assert len({getattr(c, key) for c in configs}) == runs


def test_a_sweep_names_what_differs_and_runs_what_was_composed() -> None:
    main = Calls()
    assert cli.run(main, "train", ["-m", "+recipe=tiny", "train.steps=1,3", "seed=4,5"]) == 0
    assert [(c.name, c.head.label, c.train.steps, c.seed) for c in main.configs] == [
        ("tiny-seed=4", "lookup-train.steps=1", 1, 4),
        ("tiny-seed=5", "lookup-train.steps=1", 1, 5),
        ("tiny-seed=4", "lookup-train.steps=3", 3, 4),
        ("tiny-seed=5", "lookup-train.steps=3", 3, 5),
    ]
    assert [p.name for p in Path.cwd().iterdir()] == ["runs"]
    assert [p.name for p in Path("runs").iterdir()] == ["sweeps"]


def test_heads_of_a_sweep_are_named_by_themselves() -> None:
    configs = cli.compose(["+recipe=smollm2", "head=mtp,eagle,eagle3,eagle3.1,lookup", "wandb.mode=disabled"], multirun=True)
    assert [c.head_dir.name for c in configs] == ["mtp", "eagle", "eagle3", "eagle3.1", "lookup"]
    mtp, eagle, eagle3, newer, lookup = configs
    assert (mtp.train.loss.hidden_weight, mtp.train.loss.kl_weight, mtp.train.loss.vocabulary) == (10, 1, 8192)
    assert (eagle.train.loss.hidden_weight, eagle.train.loss.kl_weight) == (1, 0.1)  # its own, though the recipe has others
    assert (eagle3.train.loss.hidden_weight, eagle3.train.loss.vocabulary, eagle3.head.draft_vocabulary) == (0, None, 32000)
    assert newer.head.fc_norm
    assert newer.head.norm_output
    assert (lookup.head.kind.name, lookup.head.lm_head.name, lookup.head.draft_vocabulary) == ("eagle3", "target", None)
    assert (lookup.train.loss.hidden_weight, lookup.train.loss.vocabulary) == (0, 8192)
    assert {c.train.optim.lr for c in configs} == {1e-3}  # the recipe's


def test_the_command_line_has_the_last_word() -> None:
    (cfg,) = cli.compose(["recipe=smollm2", "head=eagle3", "head.draft_vocabulary=100", "train.loss.step_decay=0.5"])
    assert (cfg.head.draft_vocabulary, cfg.train.loss.step_decay) == (100, 0.5)


def test_a_sweep_of_one_value_is_named_as_a_run() -> None:
    (cfg,) = cli.compose(["+recipe=tiny", "train.steps=2"], multirun=True)
    assert (cfg.name, cfg.head.label) == ("tiny", "lookup")


@given(st.lists(st.lists(st.text(min_size=1), min_size=1, max_size=3), min_size=2, max_size=4, unique_by=lambda o: ",".join(o)))
def test_folder_names_of_different_runs_differ(swept: list[list[str]]) -> None:
    names = [f"run-{cli._suffix(overrides)}" for overrides in swept]
    assert len(set(names)) == len(names)
    for name in names:
        assert "/" not in name
        assert "\0" not in name
        assert len(name.encode()) <= 120


def _own_recipe(folder: Path, text: str) -> Path:
    (folder / "recipe").mkdir(parents=True)
    (folder / "recipe" / "mine.yaml").write_text(text, encoding="utf-8")
    return folder


def test_own_recipes_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _own_recipe(tmp_path / "it's mine", "# @package _global_\nname: mine\ntrain: {steps: 5}\n")
    main = Calls()
    assert cli.run(main, "train", ["--config-dir", str(folder), "+recipe=mine"]) == 0
    assert (main.configs[0].name, main.configs[0].train.steps) == ("mine", 5)
    assert cli.run(main, "train", ["--config-dir", str(folder), "+recipe=mien"]) == 2
    assert capsys.readouterr().err == "error: recipe=mien: no such recipe; near: mine\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: mine\n", "error: recipe: a recipe file must begin with the line `# @package _global_`"),
        ("# @package _global_\ntrain: {stepps: 5}\n", "error: train.stepps: no such option; near: train.steps"),
        ("# @package _global_\ntrain: {steps: many}\n", "error: train.steps: Value 'many' of type 'str' could not be converted"),
    ],
)
def test_mistakes_in_own_recipes(text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _own_recipe(tmp_path / "mine", text)
    assert cli.run(Calls(), "train", ["--config-dir", str(folder), "+recipe=mine"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(expected)
    assert err.count("\n") == 1


@pytest.mark.parametrize("header", ["# @package!_global_", "# @package", "# @package _global_ x", "\n#  @package  _global_  y"])
def test_a_recipes_header_that_hydra_cannot_read_is_named(header: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _own_recipe(tmp_path / "mine", f"{header}\nname: mine\n")
    assert cli.run(Calls(), "train", ["--config-dir", str(folder), "+recipe=mine"]) == 2
    line = header.count("\n") + 1
    told = f"mine.yaml:{line}: {header.strip()!r} is no header; a recipe begins with the line `# @package _global_`\n"
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize("name", sorted(usage.JOBS))
def test_help_names_recipes_and_jobs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(Calls(), name, ["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m mtptrain.{name} +recipe=NAME")
    for word in [*usage.JOBS, *usage.recipe_files(), "--cfg job", "--config-dir"]:
        assert word in out


@pytest.mark.parametrize("end", ["\n", "\r\n", "\u2028", "\x0b"])
def test_an_error_is_one_line_whatever_was_put_into_it(end: str) -> None:
    assert str(UserError(f"x: damaged ({end}  a, {end}b)")) == "x: damaged ( a, b)"
    assert StoreDamage(f"y {end}z").problem == "y z"


@pytest.mark.parametrize("name", sorted(usage.JOBS))
def test_a_job_module_holds_only_main(name: str) -> None:
    module = importlib.import_module(f"mtptrain.{name}")
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
    assert own == ["main"]


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in (str(Path(cli.__file__).parent.parent), os.environ.get("PYTHONPATH", "")) if p)
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_as_a_process() -> None:
    done = _python("-m", "mtptrain.train", "+recipe=smolm2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: recipe=smolm2: no such recipe; near: smollm2\n")
    done = _python("-m", "mtptrain.precompute", "--cfg", "job", "+recipe=tiny", "train.steps=2")
    assert done.returncode == 0
    assert "name: tiny\n" in done.stdout
    assert "  steps: 2\n" in done.stdout
    assert list(Path.cwd().iterdir()) == []


def test_nothing_heavy_is_imported_before_the_config_is_valid() -> None:
    jobs = ", ".join(f"mtptrain.{name}" for name in usage.JOBS)
    code = f"import sys, {jobs}\nmtptrain.cli.compose(['+recipe=tiny'])\nprint('mtptrain.cli' in sys.modules, 'torch' in sys.modules)"
    assert _python("-c", code).stdout == "True False\n"
