"""The choice between torch's operators on GPUs of which no table says which is faster: they are timed once, and the times kept.

A measurement takes some ten milliseconds, at the first call of a dtype and head_dims. Which operator is faster differs from card
to card and from release to release, so the times are those of one GPU, torch, cuDNN and ringattn.

Note [Captures]
    Nothing is measured while the current stream is captured, or in a trace. A capture of another thread forbids calls that a
    measurement makes (waiting for an event, loading a kernel); this thread is exempt from that while it measures, and without
    a driver that exempts it nothing is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Iterator
from importlib import metadata

import torch

from ringattn.kernels.attention.torch_ops import operators
from ringattn.kernels.attention.torch_ops.operators import OperatorLaunch
from ringattn.kernels.runtime import found_file

SWITCH = "RINGATTN_MEASURE_KERNELS"
"""Environment variable: 0 measures nothing and reads no times."""

ROWS = 2048
HEADS = 16
RUNS = 2
"""Runs between two events."""
REPEATS = 3
"""Pairs of events, of which the shortest counts."""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""

Times = dict[str, dict[str, float]]
"""Milliseconds of one causal square and one full one, by direction ("forward", "backward") and backend."""

_known: dict[tuple[torch.device, str, tuple[str, ...]], Times] = {}


def choose_faster(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> tuple[str, str] | None:
    """Return the backends to try first, forward and backward; None: there is no choice, or nothing can be measured now."""
    known = operators.by_table(device)
    if known is not None:
        return known, known
    if len(operators.preferred(device)) < 2:
        return None
    if not is_switched_on():
        return operators.DEFAULT, operators.DEFAULT
    times = find_times(device, dtype, head_dim, v_head_dim)
    if times is None:
        return None
    forward, backward = (find_fastest(times[way]) for way in ("forward", "backward"))
    return forward, backward


def find_times(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> Times | None:
    """Return the times of the backends that torch runs: those of this process, of the file, or of a measurement now.

    None where fewer than two run, where torch must be deterministic, and where nothing can be measured now.
    """
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    if operators.active_flash() is not None or torch.are_deterministic_algorithms_enabled():
        return None
    names = operators.runnable(device, dtype, head_dim, v_head_dim)
    if len(names) < 2:
        return None
    entry = f"{str(dtype).removeprefix('torch.')} {head_dim} {v_head_dim}"
    key = device, entry, names
    if key not in _known:
        place = environment(device)
        times = _checked(found_file.read(place, entry), names)
        if times is None:
            times = measure(device, dtype, (head_dim, v_head_dim), names)
            if times is None:
                return None
            found_file.write(place, entry, times)
        _known[key] = times
    return _known[key]


def find_fastest(times: dict[str, float]) -> str:
    """Return the backend that took least."""
    return min(times, key=times.__getitem__)


def is_switched_on() -> bool:
    """Return whether SWITCH allows measurements, as it does where it is not set."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, got {value!r}; unset it to measure")
    return value != "0"


def environment(device: torch.device) -> str:
    """Return all that times depend on beside dtype and head_dims: GPU, compute capability, torch, cuDNN and ringattn."""
    try:
        version = metadata.version("ringattn")
    except metadata.PackageNotFoundError:
        version = "of a source tree"
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, torch {torch.__version__}, "
        f"cuDNN {torch.backends.cudnn.version()}, ringattn {version}"
    )


def measure(
    device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], names: tuple[str, ...]
) -> Times | None:
    """Return the times of backends on ROWS rows and HEADS heads, less those that fail; None: nothing could be measured.

    Leaves the random state alone.
    """
    times: Times = {"forward": {}, "backward": {}}
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False), exempt_thread():
            generator = torch.Generator(device).manual_seed(0)
            d, dv = head_dims
            q, k, v, do = (
                torch.randn(1, ROWS, HEADS, width, dtype=dtype, device=device, generator=generator)
                for width in (d, d, dv, dv)
            )
            for name in names:
                with contextlib.suppress(Exception):  # an operator that refuses this GPU is no candidate
                    found = _time_backend(name, (q, k, v, do), d**-0.5)
                    for way, milliseconds in zip(times, found, strict=True):
                        times[way][name] = milliseconds
    except (OSError, RuntimeError):  # no driver, or no memory
        return None
    return times if times["forward"] else None


def _time_backend(name: str, given: tuple[torch.Tensor, ...], scale: float) -> tuple[float, float]:
    """Return the milliseconds of both directions."""
    q, k, v, do = given
    part = (0, ROWS)
    launches = [OperatorLaunch((0, 1), part, part, causal=causal) for causal in (True, False)]
    finished = [operators.forward(name, q, k, v, scale, launch) for launch in launches]

    def forward() -> None:
        for launch in launches:
            operators.forward(name, q, k, v, scale, launch)

    def backward() -> None:
        for launch, (o, lse) in zip(launches, finished, strict=True):
            operators.backward(name, do, q, k, v, o, lse, scale, launch)

    return time_ms(forward), time_ms(backward)


def time_ms(run: Callable[[], None]) -> float:
    """Return the milliseconds that a run takes on the current stream, at best, behind one that warms up."""
    run()
    best = math.inf
    for _ in range(REPEATS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(RUNS):
            run()
        ended.record()
        ended.synchronize()
        best = min(best, begun.elapsed_time(ended) / RUNS)
    return best


@contextlib.contextmanager
def exempt_thread() -> Iterator[None]:
    """Let calls of this thread not disturb a capture of another one (Note [Captures]).

    Raises:
        OSError: There is no driver.
        RuntimeError: The driver refuses.
    """
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    if exchange(ctypes.byref(mode)):
        raise RuntimeError("the driver must let a thread measure while another one captures, got a refusal")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _checked(found: object, names: tuple[str, ...]) -> Times | None:
    """Return times that were read, for these backends; None: they are none."""
    if not isinstance(found, dict):
        return None
    times: Times = {}
    for way in ("forward", "backward"):
        of_way = found.get(way)
        if not isinstance(of_way, dict) or not of_way:
            return None
        if not all(type(x) is float and 0 < x < math.inf and name in names for name, x in of_way.items()):
            return None
        times[way] = of_way
    return times
