"""Session of a command on all ranks: its flags, its device, the machine line, and how results are printed and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import operator
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist

from ringattn.launch.common.distributed import RESTARTS, Refusal, Session, init_ranks

Keep = Callable[[list[dict[str, Any]]], None]
"""Called with all rows so far after each measurement, on every rank: an aborted run keeps its rows."""

FROM_ZERO = ("compare_steps", "max_restarts", "nccl_max_ctas", "sample_len", "simulate", "warmup_steps", "window")
"""Counts that may be 0 though their defaults are not."""
POSITIVE = ("cache_gib", "latency_ms", "max_body_mib", "max_grad_norm", "time_limit", "timeout", "timeout_s")
"""Numbers that may not be 0."""
OUTPUTS = ("json", "picture", "profile")
"""Files that commands write at their end."""
ANY = ("port", "soak")
"""Numbers that are checked elsewhere."""


@contextlib.contextmanager
def open_session(device: str = "auto", timeout_s: float = 120.0) -> Iterator[Session]:
    """Context with the ranks that torchrun started, or with this process alone; see `init_ranks`."""
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(init_ranks(device, timeout_s))
        except Refusal as error:
            raise SystemExit(f"error: {error}") from None
        except (ValueError, dist.DistError) as error:  # of torch's rendezvous
            place = ":".join(os.environ.get(name, "nothing") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise SystemExit(
                f"error: ranks must meet at MASTER_ADDR:MASTER_PORT, got {place}: {str(error).splitlines()[0]}; "
                "start them with torchrun, or unset RANK and WORLD_SIZE for one process"
            ) from error
        yield session


def parse(kind: Any, arguments: Sequence[str] | None, prog: str, description: str) -> Any:
    """The command line as the dataclass `kind`, or as one of several by the names of their sub-commands."""
    try:
        import tyro
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"error: {prog} needs {error.name}; install it with: pip install 'ringattn[launch]'"
        ) from error
    if isinstance(kind, dict):
        kind = functools.reduce(
            operator.or_, (Annotated[one, tyro.conf.subcommand(name)] for name, one in kind.items())
        )
    args = tyro.cli(kind, args=arguments, prog=f"python -m ringattn.launch.{prog}", description=description)
    try:
        check_numbers(args)
        if hasattr(args, "impl"):
            check_kernels(args.impl)
        if os.environ.get("RANK", "0") == "0":
            check_output(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    return args


def check_kernels(name: str) -> None:
    """Raise ValueError for a name of no kernel set.

    Example:
        >>> check_kernels("hooper")
        Traceback (most recent call last):
        ValueError: impl must be "auto" or one of hopper, torch, portable, eager, got 'hooper'; use "auto"
    """
    from ringattn.kernels.registry import select_kernels

    with contextlib.suppress(NotImplementedError):  # known, though not for this
        select_kernels(torch.device("cpu"), torch.float64, 64, 64, impl=name)


def check_output(args: Any) -> None:
    """Raise ValueError if a file of OUTPUTS, or the file `name` in the folder `out`, cannot be written; leaves nothing behind."""
    out, file = getattr(args, "out", None), getattr(args, "name", None)
    if out is not None and file is not None:
        taken = out / f"{file}.json"
        if not Path(file).name or taken.is_dir():
            got = f"{file}: {taken} is a folder" if Path(file).name else repr(file)
            raise ValueError(f"name must be that of a file, got {got}; pass another --name")
    for name in ("out", *OUTPUTS):
        if (path := getattr(args, name, None)) is None:
            continue
        try:
            if name != "out" and path.is_dir():
                raise IsADirectoryError("it is a folder")
            folder = path if name == "out" else path.parent
            with tempfile.TemporaryFile(dir=next(one for one in (folder, *folder.parents) if one.exists())):
                pass
        except OSError as error:
            raise ValueError(
                f"{name} must be a place that can be written, got {path}: {error}; pass another --{name}"
            ) from None


def check_numbers(args: Any) -> None:
    """Raise ValueError for numbers of a command line that make no sense, by the names and defaults of the dataclass fields.

    Counts must be at least 1 (0 where that is a default, and in FROM_ZERO), other numbers at least 0 (above it in POSITIVE) and
    finite, and seeds have 64 bits; where a field takes several values and has some by default, there must be one; key/value heads
    must divide the query heads.

    Example:
        >>> @dataclasses.dataclass
        ... class Shape:
        ...     heads: int = 4
        ...     kv_heads: tuple[int, ...] = (2, 4)
        >>> check_numbers(Shape(heads=6))
        Traceback (most recent call last):
        ValueError: kv_heads must divide the 6 heads, got 4; pass another --kv-heads
    """
    for field in dataclasses.fields(args):
        value, default = (
            one if isinstance(one, tuple) else (one,) for one in (getattr(args, field.name), field.default)
        )
        flag = f"pass another --{field.name.replace('_', '-')}"
        if default and not value:
            raise ValueError(f"{field.name} must have at least one value, got none; {flag}")
        for one in value:
            if isinstance(one, bool) or not isinstance(one, (int, float)) or field.name in ANY:
                continue
            if "seed" in field.name:
                if not -(2**63) <= one < 2**64:
                    raise ValueError(f"{field.name} must be from -2**63 to 2**64 - 1, got {one}; {flag}")
                continue
            whole = not any(isinstance(x, float) for x in (one, *default))
            least = 1 if whole and field.name not in FROM_ZERO and 0 not in default else 0
            unlimited = whole or field.name == "max_grad_norm" or math.inf in default
            above = one > 0 if field.name in POSITIVE else one >= least  # comparisons with NaN are false
            if not above or not (unlimited or one < math.inf):
                words = "above 0" if field.name in POSITIVE else f"at least {least}"
                raise ValueError(f"{field.name} must be {words}, got {one}; {flag}")
    heads, kv_heads = getattr(args, "heads", 0), getattr(args, "kv_heads", ())
    for one in kv_heads if isinstance(kv_heads, tuple) else (kv_heads,):
        if heads % one:
            raise ValueError(f"kv_heads must divide the {heads} heads, got {one}; pass another --kv-heads")


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None


@functools.cache
def commit() -> str | None:
    """The commit of the source tree this package lies in, with "+changes" when it is not clean; None when installed."""
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None
    found = _first_line("git", "-C", str(home), "rev-parse", "--short=12", "HEAD")
    changed = _first_line("git", "-C", str(home), "status", "--porcelain", "--untracked-files=no")
    return found and found + ("+changes" if changed else "")


def installed(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The model of this host's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine(session: Session) -> dict[str, Any]:
    """The machine line: versions and devices that the numbers of a run depend on, ready for JSON."""
    from torch.cuda import nccl

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "ringattn": installed("ringattn"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": installed("triton"),
        "einops": installed("einops"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if count else None,
        "nccl": ".".join(map(str, nccl.version())) if count and dist.is_nccl_available() else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cpu": f"{cpu_name()} x {os.cpu_count()}",
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "device": session.device.type,
        "world_size": session.world_size,
        "backend": session.backend,
        "command": command_line(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def command_line() -> str:
    """The command that starts this process again."""
    program = Path(sys.argv[0])
    launcher = ["python"]
    # a command that starts its own ranks uses the same agent
    if "TORCHELASTIC_RUN_ID" in os.environ and RESTARTS not in os.environ:
        launcher = ["torchrun", "--nproc_per_node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
    module = program.parent.name if program.name == "__main__.py" else program.stem
    folder = program.parent.parent if program.name == "__main__.py" else program.parent
    name = ["-m", f"ringattn.launch.{module}"] if folder.name == "launch" else [program.name]
    return shlex.join([*launcher, *name, *sys.argv[1:]])


def describe(line: dict[str, Any]) -> str:
    """The machine line as text."""
    gpus = line["gpus"]
    where = f"{len(gpus)} x {gpus[0]}" if line["device"] == "cuda" else line["cpu"]
    parts = [where, f"{line['world_size']} rank(s)", line["backend"] or "no process group", f"torch {line['torch']}"]
    parts += [f"{name} {line[name]}" for name in ("triton", "nccl", "driver", "commit") if line[name]]
    return ", ".join(parts)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: drawn on a terminal, aligned plain text elsewhere. None is shown as "-"."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        with contextlib.suppress(ModuleNotFoundError):
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text

            drawn = Table(title=title, title_justify="left")
            for column in columns:
                drawn.add_column(column, overflow="fold")
            for row in cells:
                drawn.add_row(*(Text(cell) for cell in row))
            Console().print(drawn)
            return
    lines = [list(columns), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for row in lines:
        print(("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip())
    print(flush=True)


def keeper(path: Path, session: Session, head: dict[str, Any]) -> Keep:
    """Return a `Keep` that writes `head`, as it is then, and all rows so far as JSON, on rank 0."""

    def keep(rows: list[dict[str, Any]]) -> None:
        if session.first:
            write_json(path, {**head, "rows": rows})

    return keep


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, whole or not at all, also beside another process that writes the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
