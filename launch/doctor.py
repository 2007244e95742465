"""Report of this machine, and of what the library would use on it: versions, devices, links, transports and kernels.

python -m ringattn.launch.doctor
torchrun --nproc_per_node 4 -m ringattn.launch.doctor      # and measures the links
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ringattn.kernels.runtime import found_file
from ringattn.launch.common.session import Session, describe, installed, machine, open_session, parse, table, write_json

FAILED = {"name": "none", "why": "the tiny attention failed"}
MIB = 2**20
MESSAGE_MIB = (1, 8, 64)
HEAD_DIMS = (64, 128)
PACKAGES = ("einops", "triton", "numpy", "tyro", "rich", "tqdm", "matplotlib", "transformers")


@dataclass(frozen=True)
class DoctorArgs:
    """Reports what this machine has and what the library would use on it, and why."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # GPUs where there are any, or the CPU.
    json: Path | None = None  # Where to write the report as JSON.
    # Where to write a profile for `ringattn.launch.plan`: kernels, memory and, under torchrun, links and rings of this machine,
    # measured in one to two minutes. Needs GPUs.
    profile: Path | None = None
    nodes: int = 0  # Nodes of the ring whose transport is shown; 0: by host, where each has equally many ranks.


def list_devices() -> list[dict[str, Any]]:
    """Name, architecture and memory of every GPU that this process can see."""
    rows = []
    # GPUs are counted by their driver, also where torch cannot use it
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        row = {"index": index, "name": gpu.name, "architecture": f"sm_{gpu.major}{gpu.minor}"}
        row |= {"multiprocessors": gpu.multi_processor_count, "memory_gib": round(gpu.total_memory / 2**30, 1)}
        rows.append(row)
    return rows


def read_topology() -> str | None:
    """Output of nvidia-smi about the links between GPUs."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.rstrip() if done.returncode == 0 else None


def list_backends() -> dict[str, str]:
    """Backends of process groups that torch was built with."""
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = {name: "built in" if there else "not in this build of torch" for name, there in built.items()}
    found["nccl"] += "" if torch.cuda.is_available() else "; no GPU to use it on"
    return found


def choose_transport(session: Session, nodes: int = 0) -> dict[str, str]:
    """Transport of a ring over all ranks, and the reason; `nodes` as in `DoctorArgs`."""
    if session.world_size == 1:
        return {"name": "none", "why": "one rank: every key is here already"}
    import ringattn

    hosts = Counter(session.gather(socket.gethostname()))
    by_host = "auto" if len(set(hosts.values())) == 1 else 1
    ring = ringattn.Ring(nodes=nodes or by_host)
    x = torch.zeros(1, 1, 1, 64, device=session.device, dtype=torch.float32)
    ringattn.ring_attention(x, x, x, ring.sharding(session.world_size))
    if ring.transport.name == "copy_engine":
        between = "" if ring.context.nodes is None else f" within nodes, process group ({session.backend}) between them"
        return {"name": f"copy engine{between}", "why": ring.transport.why}
    where = "GPU memory" if session.device.type == "cuda" else "host memory"
    why = f"{session.world_size} ranks with shards in {where}; one batched group of sends and receives per step"
    if session.device.type == "cuda":
        why += f"; not the copy engine: {ring.transport.why}"
    return {"name": f"process group ({session.backend})", "why": why}


def choose_kernels(device: torch.device) -> list[dict[str, Any]]:
    """Per dtype and head dim: the kernel set of `impl="auto"`, the reason, and the reasons against the others."""
    from ringattn.kernels.registry import select_kernels

    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for head_dim in HEAD_DIMS:
            row = {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim}
            try:
                choice = select_kernels(device, dtype, head_dim, head_dim, impl="auto")
                row |= {"kernels": choice.name, "why": choice.reason, "rejected": dict(choice.rejected)}
            except (NotImplementedError, ValueError) as refusal:
                row |= {"kernels": None, "why": str(refusal), "rejected": {}}
            rows.append(row)
    return rows


def measure_operators(device: torch.device) -> list[dict[str, Any]]:
    """Per dtype, head dim and direction: milliseconds of torch's operators on a GPU of which no table says which is faster."""
    from ringattn.kernels.attention.torch_ops import measure, operators

    rows: list[dict[str, Any]] = []
    if device.type != "cuda" or operators.by_table(device) is not None or not measure.is_switched_on():
        return rows
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in HEAD_DIMS:
            times = measure.find_times(device, dtype, head_dim, head_dim) or {}
            row = {"dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim}
            rows += [
                {**row, "direction": way, "ms": ms, "chosen": measure.find_fastest(ms)} for way, ms in times.items()
            ]
    return rows


def try_attention(session: Session) -> dict[str, Any]:
    """Run one tiny causal attention, forward and backward, over all ranks, and check that the results are finite."""
    import ringattn

    started = time.perf_counter()
    dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
    sharding = ringattn.Ring().sharding(32 * session.world_size, layout="zigzag")
    shape = 1, sharding.shard_len, 2, 64
    q, k, v = (torch.randn(shape, device=session.device, dtype=dtype, requires_grad=True) for _ in range(3))
    o = ringattn.ring_attention(q, k, v, sharding, causal=True)
    o.sum().backward()
    finite = all(bool(x.isfinite().all()) for x in (o, q.grad, k.grad, v.grad) if x is not None)
    result = "forward and backward are finite" if finite else "results are not finite"
    return {"ok": finite, "result": result, "seconds": round(time.perf_counter() - started, 2)}


def measure_links(session: Session) -> list[dict[str, Any]]:
    """Time messages from every rank to the next, all at once, as in the ring.

    GB/s is what one rank receives per second, in 10^9 bytes, of the slowest rank; the median of many.
    """
    rows = []
    after, before = (session.rank + 1) % session.world_size, (session.rank - 1) % session.world_size
    for mib in MESSAGE_MIB:
        sent = torch.ones(mib * MIB, dtype=torch.uint8, device=session.message_device)
        received = torch.empty_like(sent)
        times = []
        for _ in range(12 if sent.is_cuda else 4):
            session.barrier()
            started = time.perf_counter()
            operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if sent.is_cuda:
                torch.cuda.synchronize(session.device)
            times.append(time.perf_counter() - started)
        seconds = statistics.median(session.maximum(times)[1:])
        whole = bool((received == 1).all())
        rows.append({"mib": mib, "ms": seconds * 1e3, "gb_per_s": mib * MIB / seconds / 1e9, "intact": whole})
    return rows


def find_faults(report: dict[str, Any]) -> list[str]:
    """Faults in a report: reasons why the library cannot work here."""
    faults = []
    if report["devices"] and report["versions"]["triton"] is None:
        faults.append("triton must be installed to use the GPUs, got nothing; install the CUDA wheel of torch")
    if not report["devices"] and report["machine"]["driver"]:
        faults.append("torch must see the GPUs that nvidia-smi sees, got none; install the CUDA wheel of torch")
    if not any(row["kernels"] for row in report["kernels"]):
        faults.append("one kernel set must serve this device, got none; see the table of kernels")
    if not report["attention"]["ok"]:
        faults.append(
            f"a tiny attention must work, got: {report['attention']['result']}; run the check command for details"
        )
    damaged = [row["mib"] for row in report["links"] if not row["intact"]]
    return [*faults, *(f"messages of {mib} MiB must arrive whole, got other bytes" for mib in damaged)]


def examine(session: Session, nodes: int = 0) -> dict[str, Any]:
    """The whole report, ready for JSON; the same on every rank."""
    try:
        attention = try_attention(session)
    except Exception as error:  # becomes a fault of the report
        attention = {"ok": False, "result": f"{type(error).__name__}: {error}", "seconds": None}
    works = session.maximum([0.0 if attention["ok"] else 1.0])[0] == 0
    where = session.gather((session.rank, socket.gethostname(), str(session.device), attention))
    if not works:
        attention = next(one for *_, one in where if not one["ok"])
    devices = list_devices()
    gpus = range(len(devices))
    report: dict[str, Any] = {
        "machine": machine(session),
        "versions": {name: installed(name) for name in PACKAGES},
        "devices": devices,
        "peer_access": [[x == y or torch.cuda.can_device_access_peer(x, y) for y in gpus] for x in gpus],
        "topology": read_topology(),
        "ranks": [{"rank": rank, "host": host, "device": device} for rank, host, device, _ in where],
        "backends": list_backends(),
        "transport": choose_transport(session, nodes) if works else FAILED,
        "kernels": choose_kernels(session.device),
        "operators": measure_operators(session.device) if works else [],
        "attention": attention,
        "links": measure_links(session) if works and session.world_size > 1 else [],
    }
    report["faults"] = sorted({fault for one in session.gather(find_faults(report)) for fault in one})
    return report


def show(report: dict[str, Any]) -> None:
    """Print a report as text."""
    line = report["machine"]
    print(describe(line))
    built = ("ringattn", "commit", "python", "torch", "cuda", "cudnn", "nccl", "driver", "cpu")
    versions = [*((name, line[name]) for name in built), *report["versions"].items()]
    absent = {"ringattn": "source tree"}
    table("versions", ["what", "version"], [[name, x or absent.get(name, "not here")] for name, x in versions])
    if report["devices"]:
        columns = ["index", "name", "architecture", "multiprocessors", "memory_gib"]
        table("GPUs", columns, [[row[column] for column in columns] for row in report["devices"]])
        peers = [[x, *("yes" if one else "no" for one in row)] for x, row in enumerate(report["peer_access"])]
        table(
            "peer access: can the GPU of the row read the GPU of the column",
            ["GPU", *map(str, range(len(peers)))],
            peers,
        )
    else:
        print("no GPU is visible to torch: everything runs on the CPU, which is for tests and small problems\n")
    if report["topology"]:
        print(f"nvidia-smi topo -m\n{report['topology']}\n")
    table("ranks", ["rank", "host", "device"], [list(row.values()) for row in report["ranks"]])
    table("ways to move bytes", ["backend", "state"], [list(row) for row in report["backends"].items()])
    print(f"transport: {report['transport']['name']}: {report['transport']['why']}\n")
    kernels = []
    for row in report["kernels"]:
        others = "; ".join(f"{name}: {why}" for name, why in row["rejected"].items())
        kernels.append([row["device"], row["dtype"], row["head_dim"], row["kernels"], row["why"], others or None])
    table('kernels with impl="auto"', ["device", "dtype", "head_dim", "kernels", "why", "why not others"], kernels)
    if report["operators"]:
        columns = ["dtype", "head_dim", "direction", "ms", "chosen"]
        timed = [
            {**row, "ms": ", ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())}
            for row in report["operators"]
        ]
        title = f"torch's operators, measured on this GPU ({found_file.find_path()})"
        table(title, columns, [[row[column] for column in columns] for row in timed])
    if report["links"]:
        links = [[row["mib"], f"{row['ms']:.3f}", f"{row['gb_per_s']:.2f}"] for row in report["links"]]
        table("links: each rank to the next, all at once", ["MiB", "ms", "GB/s"], links)
    elif len(report["ranks"]) == 1:
        print("links: not measured with one rank; start with torchrun --nproc_per_node N\n")
    seconds = report["attention"]["seconds"]
    print(f"a tiny attention: {report['attention']['result']} ({seconds} s, first compilation included)")
    for fault in report["faults"]:
        print(f"broken: {fault}")
    print("broken" if report["faults"] else "healthy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 unless something is broken."""
    args: DoctorArgs = parse(DoctorArgs, arguments, "doctor", (DoctorArgs.__doc__ or "").split("\n")[0])
    with open_session(args.device) as session:
        if args.nodes:
            from ringattn.launch.common.ring_variants import check_nodes

            check_nodes(args.nodes, session.world_size)
        if args.profile is not None and session.device.type != "cuda":
            raise SystemExit("error: profile must be measured on GPUs, got the CPU; leave out --profile")
        report = examine(session, args.nodes)
        if session.rank == 0:
            show(report)
            if args.json is not None:
                write_json(args.json, report)
        if args.profile is not None and not report["faults"]:
            from ringattn.launch.plan.measure import measure_profile
            from ringattn.sizing import write_profile

            profile = measure_profile(session)
            if session.rank == 0:
                write_profile(profile, args.profile)
                print(f"profile of {profile.name}: {args.profile}")
    return int(bool(report["faults"]))


if __name__ == "__main__":
    sys.exit(main())
