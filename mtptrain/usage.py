"""What there is to type: jobs, recipes, and the text of `--help`."""

from pathlib import Path

JOBS = {
    "train": "every stage that is not complete yet, in order: prepare, precompute, train, validate, export",
    "prepare": "prompts -> responses written by the target, token ids and supervised spans",
    "precompute": "the target's hidden states -> a store on disk",
    "validate": "acceptance of the trained head, by walk, reference decoder and a real vLLM, and whether they agree",
    "export": "one folder per engine, once validation passed",
    "compare": "the heads of a run side by side; a sweep of train, validate or export ends with it",
    "plan": "tokens, disk, memory and time of it all, before anything is spent",
}


def config_dir(name: str) -> Path:
    """`conf` or `recipes`: inside an installed package as `_conf`, in a checkout beside the package."""
    package = Path(__file__).resolve().parent
    shipped = package / f"_{name}"
    return shipped if shipped.is_dir() else package.parent / name


def recipe_files() -> dict[str, Path]:
    return {file.stem: file for file in sorted(config_dir("recipes").glob("*.yaml"))}


def help_text(job: str) -> str:
    """What `--help` prints."""
    titles = {name: file.read_text(encoding="utf-8").splitlines()[1].lstrip("# ") for name, file in recipe_files().items()}
    width = max(map(len, [*titles, *JOBS])) + 2
    recipes = "\n".join(f"  {name:{width}}{title}" for name, title in titles.items())
    jobs = "\n".join(f"  {name:{width}}{what}" for name, what in JOBS.items())
    return f"""usage: python -m mtptrain.{job} +recipe=NAME [key=value ...]

{job}: {JOBS.get(job, "")}

recipes (+recipe=NAME):
{recipes}

jobs (python -m mtptrain.JOB):
{jobs}

options:
  key=value            any key of mtptrain/config.py, such as train.steps=3 name=mine root=/data/runs
  --cfg job            print the composed config and stop
  -m key=a,b           a sweep: one run a value; runs that differ in the head alone share data and store
  --config-dir DIR     recipes of your own: DIR/recipe/mine.yaml, used as +recipe=mine (first line: # @package _global_)
  --hydra-help         all of Hydra's own flags
environment: MTPTRAIN_TRACE=1 shows the trace of an error, MTPTRAIN_CACHE moves the cache of converted targets"""
