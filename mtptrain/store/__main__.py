"""Look at stores, check them, and make runs of others.

    python -m mtptrain.store info RUN [--json]
    python -m mtptrain.store verify RUN [--fast]
    python -m mtptrain.store merge NEW RUN RUN ...
    python -m mtptrain.store filter NEW RUN [--source S ...] [--split train|held_out ...] [--ids FILE] [--without-ids FILE]
                                            [--min-tokens N] [--max-tokens N]

RUN is a run's folder (runs/smollm2); info and verify take its store as well. Exit status: 0, 2 for what the user can mend, as damage is.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mtptrain import manifest
from mtptrain.data.documents import HELD_OUT, TRAIN
from mtptrain.errors import UserError
from mtptrain.signals import exit_status, handled
from mtptrain.store.verify import describe, find_damage


def _store(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name a run's, such as runs/smollm2")
    return folder / "store" if (folder / "store").is_dir() else folder


def _info(arguments: argparse.Namespace) -> None:
    found = describe(_store(arguments.run))
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    console = Console()
    for name in ("documents", "rejected", "tokens", "supervised_tokens", "shards", "bytes"):
        print(f"{name.replace('_', ' '):18} {found[name]:,}")
    console.print(_table("part", ["codec", "bytes_per_token", "bytes"], found["parts"]))
    console.print(_table("source", ["documents", "tokens", "supervised_tokens"], found["sources"]))
    for key, value in found["made_from"].items():
        print(f"{key:26} {value if key != manifest.DERIVED else json.dumps(value)}")


def _table(first: str, names: list[str], rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for label, row in rows.items():
        table.add_row(label.replace("[", r"\["), *(f"{row[n]:,}" if isinstance(row[n], int | float) else str(row[n]) for n in names))
    return table


def _verify(arguments: argparse.Namespace) -> None:
    folder, found = _store(arguments.run), 0
    for problem in find_damage(folder, whole=not arguments.fast):
        found += 1
        print(problem, flush=True)
    if found:
        raise UserError(f"{folder}: {found} problems; run precompute again, which makes what is damaged or missing anew, and no more")
    print(f"{folder} is whole" + (" (sizes and headers; not hashed)" if arguments.fast else ""))


def _merge(arguments: argparse.Namespace) -> None:
    if len(arguments.runs) < 2:
        raise UserError("merge needs two runs at least: python -m mtptrain.store merge NEW RUN RUN ...")
    from mtptrain.store.derive import merge  # it and what it needs take a second

    _tell(arguments.new, merge(arguments.new, arguments.runs))


def _filter(arguments: argparse.Namespace) -> None:
    from mtptrain.store.derive import filter_run

    tokens = (arguments.min_tokens, arguments.max_tokens)
    ids, without_ids = _ids(arguments.ids), _ids(arguments.without_ids)
    _tell(arguments.new, filter_run(arguments.new, arguments.run, arguments.source, arguments.split, ids, without_ids, tokens))


def _ids(file: Path | None) -> list[str] | None:
    """One a line."""
    if file is None:
        return None
    try:
        found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {file} ({e}); --ids and --without-ids name a file of document ids, one a line") from e
    if not found:
        raise UserError(f"{file} holds no document id; --ids and --without-ids name a file of them, one a line")
    return found


def _tell(new: Path, dropped: Counter[str]) -> None:
    found = describe(new / "store")
    print(f"{found['documents']:,} documents, {found['tokens']:,} tokens in {found['shards']} shards -> {new}")
    if dropped:
        print(f"dropped: {', '.join(f'{n:,} {reason}' for reason, n in dropped.items())}")
    for split in (TRAIN, HELD_OUT):
        if not any(source.endswith(f"({split})") for source in found["sources"]):
            print(f"it has no {split} documents, and a head needs some: merge it with a run that has")
    print(f"train on it with root={new.parent} name={new.name} and what else the other runs had")


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="python -m mtptrain.store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = whole.add_subparsers(required=True, metavar="info|verify|merge|filter")
    info = jobs.add_parser("info", help="what a store holds")
    info.add_argument("run", type=Path)
    info.add_argument("--json", action="store_true")
    info.set_defaults(job=_info)
    verify = jobs.add_parser("verify", help="every file against its hash")
    verify.add_argument("run", type=Path)
    verify.add_argument("--fast", action="store_true", help="sizes and headers only")
    verify.set_defaults(job=_verify)
    merged = jobs.add_parser("merge", help="one run of several, each document once")
    merged.add_argument("new", type=Path)
    merged.add_argument("runs", type=Path, nargs="+")
    merged.set_defaults(job=_merge)
    chosen = jobs.add_parser("filter", help="a run with some of another's documents")
    chosen.add_argument("new", type=Path)
    chosen.add_argument("run", type=Path)
    chosen.add_argument("--source", action="extend", nargs="+", default=[])
    chosen.add_argument("--split", action="extend", nargs="+", default=[], choices=[TRAIN, HELD_OUT])
    chosen.add_argument("--ids", type=Path, help="a file of document ids to keep, one a line")
    chosen.add_argument("--without-ids", type=Path, help="a file of document ids to drop, one a line")
    chosen.add_argument("--min-tokens", type=int, default=0)
    chosen.add_argument("--max-tokens", type=int)
    chosen.set_defaults(job=_filter)
    return whole


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        with handled():
            arguments.job(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror}; what is finished is safe", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        return exit_status(interrupt)
    return 0


if __name__ == "__main__":
    sys.exit(main())
