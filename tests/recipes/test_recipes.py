"""Every shipped recipe composes for every job and plans; the wheel carries them and finds them from anywhere."""

import argparse
import importlib
import inspect
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mtptrain import cli, usage
from mtptrain.config import Config
from mtptrain.estimate import known_spec
from mtptrain.stages import plan

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(usage.recipe_files())


def test_the_recipes_are_there() -> None:
    assert set(RECIPES) == {"smollm2", "tiny", "llama1b", "llama8b", "llama70b", "qwen3-8b", "deepseek-v2-lite"}


@pytest.mark.parametrize("job", sorted(usage.JOBS))
def test_every_recipe_composes_for_every_job(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the job's own entry point, with its work replaced by looking at the configs."""
    entry = importlib.import_module(f"mtptrain.{job}").main
    seen: list[Config] = []

    def look(main: cli.Main, args: argparse.Namespace, argv: list[str], shown: list[str], swept_well: list[Config]) -> None:
        assert main is inspect.unwrap(entry)
        seen.extend(cli.compose(args.overrides))

    monkeypatch.setattr(cli, "_run_hydra", look)
    for recipe in RECIPES:
        monkeypatch.setattr(sys, "argv", [f"mtptrain/{job}.py", f"+recipe={recipe}"])
        entry()
    assert [cfg.name for cfg in seen] == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_carries_its_name_and_shape(recipe: str) -> None:
    (cfg,) = cli.compose([f"+recipe={recipe}"])
    assert cfg.name == recipe
    spec = known_spec(cfg)
    assert spec.hidden_size == cfg.target.shape["hidden_size"]
    assert spec.num_heads % spec.num_kv_heads == 0
    text = usage.recipe_files()[recipe].read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# ")
    assert 10 <= len(text.splitlines()) <= 40


@pytest.mark.parametrize(
    ("recipe", "rope"),
    [
        ("smollm2", {"rope_type": "default", "rope_theta": 100_000.0}),
        ("llama1b", {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "original_max_position_embeddings": 8192}),
        ("llama8b", {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 8192}),
        ("llama70b", {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 8192}),
    ],
)
def test_the_shape_has_the_targets_rope(recipe: str, rope: dict[str, object]) -> None:
    found = known_spec(cli.compose([f"+recipe={recipe}"])[0]).rope
    assert {key: found[key] for key in rope} == rope


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_plans(recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mtptrain.stages.plan.free_bytes", lambda folder: 2**50)
    (cfg,) = cli.compose([f"+recipe={recipe}", "plan.matmul_tflops=1"])
    plan.run(cfg)
    out = capsys.readouterr().out
    assert out.startswith(f"plan of runs/{recipe} for {cfg.target.path} ({cfg.target.shape['model_type']}, ")
    for word in ("tokens", "head", "store", "checkpoints", "disk", "prepare", "precompute", "train", "validate"):
        assert f"\n  {word} " in out
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_does_not_fit_ends_with_its_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mtptrain.stages.plan.free_bytes", lambda folder: 2**30)
    assert cli.run(plan.run, "plan", ["+recipe=llama70b", "plan.matmul_tflops=1"]) == 2
    out, err = capsys.readouterr()
    assert "plan of runs/llama70b" in out
    assert err.startswith("error: root=runs: the run needs ")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=120, cwd=folder)
    (wheel,) = folder.glob("mtptrain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_conf_and_recipes(site: Path) -> None:
    for name in ("conf", "recipes"):
        shipped = {p.relative_to(site / "mtptrain" / f"_{name}") for p in (site / "mtptrain" / f"_{name}").rglob("*.yaml")}
        assert shipped == {p.relative_to(ROOT / name) for p in (ROOT / name).rglob("*.yaml")}
        assert len(shipped) >= 3
    assert not (site / "tests").exists()
    assert (site / "mtptrain" / "data" / "own_prompts.jsonl").exists()


def test_the_installed_package_finds_its_recipes_from_anywhere(site: Path, tmp_path: Path) -> None:
    (site / "mtptrain" / "_recipes" / "shipped.yaml").write_text("# @package _global_\n# Only here.\nname: only-here\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mtptrain.train", "--cfg", "job", "+recipe=shipped"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "name: only-here\n" in done.stdout
    assert list(tmp_path.iterdir()) == []
