"""The command line of every job: recipes, typed configs, sweeps and one-line errors. The only file that imports Hydra.

    python -m mtptrain.JOB +recipe=NAME key=value ...          one run
    python -m mtptrain.JOB -m +recipe=NAME train.steps=1,3     one run a value, none overwriting another

Nothing heavy (torch, transformers) is imported before the config is known to be valid. Exit status: 0, 2 for what the user can
mend (one line on stderr; MTPTRAIN_TRACE=1 shows the trace as well), 130 when interrupted by Ctrl-C and 143 by SIGTERM: the same
command continues.
"""

import argparse
import dataclasses
import errno
import functools
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
import yaml
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtptrain.config import Config
from mtptrain.errors import UserError, one_line
from mtptrain.files import hash_bytes
from mtptrain.near import is_free, is_option, unknown_keys, unknown_name, unknown_option
from mtptrain.signals import exit_status, handled
from mtptrain.usage import config_dir, help_text, recipe_files

Main = Callable[[Config], None]

_VERSION_BASE = "1.3"
_HEAD_SECTIONS = {"head", "train", "validate", "export", "plan", "wandb"}
"""Sweeping only these leaves data and store as they are: the runs share them and differ in their head's folder."""
_OWN_FOLDER = {"name", "root", "head.label"}
"""Sweeping these names folders already."""
_LONGEST_SUFFIX = 80
_DISK_TROUBLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""What a full, read-only or forbidden disk answers, or a folder in a file's place: the user's to mend, so one line."""

_COMPARED = {"train", "validate", "export"}
"""Jobs whose sweeps end with a comparison of the heads there are."""


@functools.cache
def _register() -> None:
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for name, file in recipe_files().items():
        store.store(group="recipe", name=name, node=OmegaConf.load(file), package="_global_")


def to_config(composed: DictConfig) -> Config:
    """The typed config; cross-field checks run here. Raises UserError naming the dotted key."""
    for key in unknown_keys(composed):
        raise UserError(unknown_option(key))
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config


def _suffix(overrides: Sequence[str]) -> str:
    """A folder-name part made from overrides; a hash keeps it unique where characters or length had to go."""
    text = ",".join(overrides)
    clean = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
    if clean == text and len(text) <= _LONGEST_SUFFIX:
        return clean
    return f"{clean[: _LONGEST_SUFFIX - 20]}-{hash_bytes(text.encode())[:8]}"


def distinct_run(config: Config, swept: Sequence[str]) -> Config:
    """The config of one run of a sweep, with folders of its own.

    `swept` holds this run's `key=value` of every swept key. Keys of the head alone extend `head.label`, so that runs share data
    and store; any other key extends `name`.
    """
    folder = config.head_dir.name
    named = [(text.partition("=")[0].lstrip("+~").partition("@")[0], text.lstrip("+")) for text in swept if text != f"head={folder}"]
    of_head = [text for key, text in named if key.partition(".")[0] in _HEAD_SECTIONS and key not in _OWN_FOLDER]
    of_run = [text for key, text in named if key.partition(".")[0] not in _HEAD_SECTIONS and key not in _OWN_FOLDER]
    return dataclasses.replace(
        config,
        name=f"{config.name}-{_suffix(of_run)}" if of_run else config.name,
        head=dataclasses.replace(config.head, label=f"{folder}-{_suffix(of_head)}") if of_head else config.head,
    )


def _constant_keys(overrides: Sequence[str]) -> set[str]:
    return {o.get_key_element() for o in OverridesParser.create().parse_overrides(list(overrides)) if not o.is_sweep_override()}


def _swept(job_overrides: Sequence[str], constant_keys: set[str]) -> list[str]:
    return [text for text in job_overrides if text.partition("=")[0] not in constant_keys]


def _jobs_of_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep; ranges without discrete values are left to their sweeper."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    choices = []
    for override, text in zip(parser.parse_overrides(list(overrides)), overrides, strict=True):
        if not override.is_sweep_override():
            choices.append([text])
        elif override.is_discrete_sweep():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    return [list(run) for run in itertools.product(*choices)]


def _plain_recipe(words: Sequence[str]) -> list[str]:
    """`+recipe=NAME` as `recipe=NAME`: the defaults list has the group, so that a recipe comes before what the head's file says."""
    plain = [word.removeprefix("+") if word.startswith("+recipe=") else word for word in words]
    if sum(word.startswith("recipe=") for word in plain) > 1:
        raise UserError("+recipe is given twice: choose one recipe, and change it with key=value")
    return plain


def compose(overrides: Sequence[str] = (), *, multirun: bool = False, user_dir: str | None = None) -> list[Config]:
    """The configs that a command line with these overrides would run: one, or one a run of a sweep.

    `user_dir` is what `--config-dir` names. Raises UserError.
    """
    _register()
    overrides = _plain_recipe(overrides)
    _check_files(user_dir)
    try:
        with initialize_config_dir(str(config_dir("conf")), version_base=_VERSION_BASE):
            runs = _jobs_of_sweep(overrides) if multirun else [list(overrides)]
            extra = _search_path(overrides, user_dir)
            configs = [to_config(hydra.compose("config", run + extra)) for run in runs]
        if multirun:
            constant = _constant_keys(overrides)
            configs = [distinct_run(config, _swept(run, constant)) for config, run in zip(configs, runs, strict=True)]
        return configs
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, overrides)) from error


def _check_files(user_dir: str | None) -> None:
    """Refuse a file of --config-dir that is no YAML, or whose header Hydra cannot read: it would end in a trace."""
    for file in sorted(Path(user_dir).rglob("*.yaml")) if user_dir else ():
        _check_header(file)
        try:
            OmegaConf.load(file)
        except yaml.MarkedYAMLError as e:
            line = f":{e.problem_mark.line + 1}" if e.problem_mark else ""
            raise UserError(f"{file}{line}: not valid YAML ({e.problem or e.context})") from e
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
            raise UserError(f"{file}: not valid YAML ({one_line(e)})") from e


def _check_header(file: Path) -> None:
    """The lines `# @KEY VALUE` that a config file of Hydra's may begin with."""
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        line = line.strip()
        if not line:
            continue
        if not re.match(r"#\s*@", line):
            return
        if len([word for word in line.lstrip("#").split(" ") if word]) != 2:
            raise UserError(f"{file}:{number}: {line!r} is no header; a recipe begins with the line `# @package _global_`")


def _search_path(overrides: Sequence[str], user_dir: str | None) -> list[str]:
    if user_dir is None or any(text.lstrip("+").startswith("hydra.searchpath=") for text in overrides):
        return []
    quoted = f"file://{Path(user_dir).resolve()}".replace("'", "\\'")
    return [f"hydra.searchpath=['{quoted}']"]


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One line for an error of Hydra or omegaconf: which override is wrong, and what was probably meant."""
    if isinstance(error, OverrideParseException):
        return _explain_syntax(error.override)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return unknown_name(f"{group}={name}: no such {group}", name, list(error.options))
    cause = (error.__cause__ or error.__context__) if isinstance(error, ConfigCompositionException) else error
    key = getattr(cause, "full_key", None)
    if not key:
        return _explain_composition(str(error).splitlines()[0], overrides)
    key = re.sub(r"\[\d+\]$", "", key)  # an item of a list
    if is_free(key) or (not is_option(key) and not key.startswith("hydra")):
        return unknown_option(_as_typed(key, overrides))
    return _explain_value(key, str(cause).splitlines()[0], overrides)


def _explain_syntax(text: str) -> str:
    name = text.lstrip("+")
    if name == "recipe" or name == "recipe=":
        return f"{text}: name the recipe, +recipe=NAME; there are: {', '.join(recipe_files())}"
    if "=" not in text:
        if name in recipe_files():
            return f"{text}: a recipe is given as +recipe={name}"
        return f"{text}: an override is key=value; " + ("it needs a value" if is_option(name) else unknown_option(name).partition("; ")[2])
    return f"{text}: not a valid override; quote values that hold any of ,[]{{}}() like 'key=\"a,b\"'"


def _explain_composition(first_line: str, overrides: Sequence[str]) -> str:
    if first_line.startswith("Ambiguous value"):
        return f"{first_line.split(chr(39))[1]}: several values are a sweep and need -m; a list is written 'key=[a,b]'"
    for text in overrides:
        plain = text.partition("=")[0].lstrip("+~").partition("@")[0]
        if not is_option(plain) and plain != "recipe" and not plain.startswith("hydra"):
            return unknown_option(plain)
    return first_line


def _as_typed(key: str, overrides: Sequence[str]) -> str:
    """The override's whole key where Hydra names only its unknown beginning."""
    typed = (text.partition("=")[0].lstrip("+~") for text in overrides)
    return next((whole for whole in typed if whole.startswith(f"{key}.")), key)


def _explain_value(key: str, message: str, overrides: Sequence[str]) -> str:
    given = next((text.partition("=")[2] for text in reversed(overrides) if text.partition("=")[0].lstrip("+") == key), None)
    shown = key if given is None else f"{key}={given}"
    if key == "head.kind" and given and (config_dir("conf") / "head" / f"{given}.yaml").is_file():
        return f"{shown}: {given} is a kind with options of its own; write head={given}"
    choices = re.search(r"expected one of \[(.*)\]", message)
    if choices and given:
        return unknown_name(f"{shown}: no such choice", given.strip("[]"), choices.group(1).split(", "))
    if given and "is not a ListConfig" in message:
        return f"{shown}: takes a list; write {key}=[{given}]"
    return f"{shown}: {message}"


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Hydra's flags, and the command line with flags before overrides (argparse wants it so)."""
    parser = get_args_parser()
    args, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        raise UserError(f"{unknown[0]}: no such flag (see --help); a recipe is given as +recipe=NAME, an option as key=value")
    return args, [word for word in argv if word not in args.overrides] + args.overrides


def _check(args: argparse.Namespace) -> None:
    """Compose a whole sweep, so that a mistake in its last run stops its first, and what --cfg is about to print.

    A single run is checked when it starts.
    """
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise UserError(f"--config-dir {args.config_dir}: no such folder; it should hold recipe/NAME.yaml")
    if args.multirun and (args.cfg or args.info or args.run):
        raise UserError("-m runs a sweep and goes with none of --cfg, --info and --run; print one run's config without -m")
    _check_files(args.config_dir)
    multirun = args.multirun or "hydra.mode=MULTIRUN" in args.overrides
    if (multirun or args.cfg) and args.config_name is None and args.config_path is None:
        compose(args.overrides, multirun=multirun, user_dir=args.config_dir)


def _call(main: Main, cfg: Config) -> None:
    """`main(cfg)`, with disk trouble as the one line it is to a user."""
    try:
        main(cfg)
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{where}{error.strerror}; what is finished is safe, the same command continues once that is mended") from error


def _run_hydra(main: Main, args: argparse.Namespace, argv: list[str], shown: list[str], swept_well: list[Config]) -> None:
    """Hand over to Hydra, which calls `main` once or once a run of a sweep.

    What was told to the user is noted in `shown`, the runs of a sweep that succeeded in `swept_well`.
    """

    def task(composed: DictConfig) -> None:
        context = HydraConfig.get()
        swept = _swept(context.overrides.task, _constant_keys(args.overrides)) if context.mode is RunMode.MULTIRUN else []
        try:
            config = distinct_run(to_config(composed), swept)
            _call(main, config)
        except UserError as error:
            # not raised: Hydra would print a line of its own, and other runs of a sweep go on
            shown.append(_tell(error, f"[{' '.join(swept)}] " if swept else ""))
            if not context.launcher._target_.endswith(".BasicLauncher"):
                raise  # this is another process (a Slurm job), whose launcher is to know
            return
        if context.mode is RunMode.MULTIRUN:
            swept_well.append(config)

    _register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us instead of Hydra's own report
    before, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        hydra.main(config_path=str(config_dir("conf")), config_name="config", version_base=_VERSION_BASE)(task)()
    finally:
        sys.argv = before


def _compare(name: str, swept_well: list[Config], shown: list[str]) -> None:
    """A comparison of the heads in every run folder of a sweep."""
    if name not in _COMPARED or not swept_well:
        return
    from mtptrain.stages import compare

    for config in {config.run_dir: config for config in swept_well}.values():
        try:
            _call(compare.after_sweep, config)
        except UserError as error:
            shown.append(_tell(error))


def _tell(error: UserError, where: str = "") -> str:
    if os.environ.get("MTPTRAIN_TRACE") == "1":
        traceback.print_exception(error)
    print(f"error: {where}{error}", file=sys.stderr, flush=True)
    return str(error)


def run(main: Main, name: str, argv: Sequence[str]) -> int:
    """One command line from parsing to exit status."""
    if {"-h", "--help"} & set(argv):
        print(help_text(name))
        return 0
    shown: list[str] = []
    swept_well: list[Config] = []
    try:
        args, ordered = _parse(_plain_recipe(argv))
        _check(args)
        try:
            with handled():
                _run_hydra(main, args, ordered, shown, swept_well)
        except Exception as error:
            _compare(name, swept_well, shown)  # a run that failed hides nothing of the others
            if type(error).__module__.startswith("submitit."):
                raise UserError(f"a job of the sweep failed: {str(error).strip().splitlines()[-1]}") from error
            raise
        failed = len(shown)
        _compare(name, swept_well, shown)
        if failed and swept_well:
            _tell(
                UserError(
                    f"{failed} of {failed + len(swept_well)} runs failed, each with its line above; a comparison shows what is finished, "
                    "also from earlier runs"
                )
            )
    except UserError as error:
        if str(error) not in shown:
            shown.append(_tell(error))
    except (HydraException, OmegaConfBaseException) as error:
        shown.append(_tell(UserError(explain(error, args.overrides))))
    except KeyboardInterrupt as interrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return exit_status(interrupt)
    return 2 if shown else 0


def job(main: Main) -> Callable[[], None]:
    """Turn `main(cfg)` into a command; `python -m mtptrain.JOB` calls the result."""

    @functools.wraps(main)
    def entry() -> None:
        name = Path(main.__code__.co_filename).stem
        status = run(main, name, sys.argv[1:])
        if status:
            sys.exit(status)

    return entry
