"""Flags of the server: names, defaults, limits, and checks before anything is loaded."""

from __future__ import annotations

import dataclasses
import gc
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ringattn.launch.common.checkpoint_files import check_place
from ringattn.launch.common.distributed import Refusal
from ringattn.launch.common.session import check_numbers

TINY = "tiny"  # the name of a model that needs no files
KEY = "RINGATTN_API_KEY"
"""Environment variable of the API key, which a command line would show to all users of the machine."""
ENDED = "RINGATTN_SERVE_ENDED"
"""Environment variable with the path of a file that rank 0 makes after an orderly shutdown."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine
MAX_CLOSING = 256
"""Connections beyond --max-connections that are being closed at a time; one more ends the wait for the first of them."""
OTHER_FILES = 64  # files of the HTTP process that are not connections
RANDOM_TOKENS = 512  # --default-tokens of a model with random weights
EXIT_S = 15.0  # seconds after --grace in which the processes of the server end


@dataclass(frozen=True)
class ServeArgs:
    """Flags of the server; comments are the text of --help."""

    # A folder of transformers (config, all weights as safetensors, tokenizer), the path of a config.json (random weights, and
    # bytes for tokens if no tokenizer is beside it), or tiny, which needs no files and talks nonsense.
    model: str
    # A folder of peft with an adapter, such as LoRA, that is merged into the model's weights.
    adapter: str | None = None
    name: str | None = None  # The name by which requests call the model; default the folder's name.
    served_model_name: tuple[str, ...] = ()  # Several such names, in place of --name; answers have the first.
    chat_template: str | None = None  # A file with the chat template, in place of the tokenizer's own.
    # How the model writes calls of tools; auto finds it in the chat template.
    tool_format: Literal["auto", "hermes", "qwen3_coder", "glm45", "llama", "harmony", "none"] = "auto"
    # How the model marks its reasoning, which answers have as reasoning_content: between <think> and </think>, or not at all.
    # auto finds it in the chat template; models of the format harmony have a channel for it.
    reasoning_format: Literal["auto", "think", "none"] = "auto"
    # Whether requests that leave out temperature, top_k, top_p, min_p or repetition_penalty get those of the model's
    # generation_config.json.
    generation_defaults: bool = True
    host: str = "127.0.0.1"  # The address to listen on; only this machine reaches the default.
    port: int = 8000  # The port; 0 for any that is free.
    # Further values of Host that requests may have, beside this machine's; * for any. By default any where --host admits other
    # machines.
    allowed_host: tuple[str, ...] = ()
    # Sites, such as https://chat.example.org, whose pages may use the server (CORS); * for any.
    allowed_origin: tuple[str, ...] = ()
    root_path: str = ""  # Path below which a proxy shows the server, such as /llm.
    access_log: bool = True  # Whether each request is printed.
    log_level: Literal["debug", "info", "warning", "error"] = "warning"  # Of the HTTP process's other messages.
    metrics_key: bool = True  # Whether /metrics needs the key, too.
    # What requests must send as a bearer token; better given by the environment variable RINGATTN_API_KEY.
    api_key: str | None = None
    # Ranks to start; by default one per GPU, or two where there are none. Under torchrun, leave it out.
    nproc: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes GPUs where there are any.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto is the config's on GPUs, float32 on CPUs.
    seed: int = 0  # Seed of random weights.
    # GiB per rank for keys and values; by default most of what a GPU has left, or 0.25 on CPUs.
    cache_gib: float | None = None
    # GiB of host memory per rank for beginnings of requests that the cache has no room for any more; on GPUs pinned memory.
    host_cache_gib: float = 0.0
    # Whether a model and cache whose planned memory GPUs cannot hold are refused before they are loaded, not only warned of.
    check_memory: bool = True
    # sharded stores the weights once over all ranks, whole on each of them; auto is sharded where whole weights would not leave
    # GPUs the room for --cache-gib, or for --max-len and --max-tokens.
    weights: Literal["auto", "sharded", "whole"] = "auto"
    page_size: int = 64  # Tokens of a page.
    # auto is the dtype; fp8 keeps keys and values in half of bfloat16's bytes, which changes answers a little.
    kv_dtype: Literal["auto", "fp8"] = "auto"
    chunk: int = 4096  # Tokens of prompts in a step that delays answers; other steps take as many on each rank.
    max_running: int = 64  # Requests that are computed at a time.
    queue: int = 256  # Requests that may be open beyond --max-running; more get status 429.
    max_connections: int = 512  # Connections that may be open, asking or not; one more gets status 503.
    # Tokens of a prompt and its answer; by default what the model's config says, which models that learned their positions cannot
    # exceed; always what the cache holds.
    max_len: int | None = None
    max_tokens: int | None = None  # New tokens that a request may ask for; by default all that fit.
    # New tokens of an answer to a chat that does not say how many; by default all that fit, or 512 where weights are random,
    # because such answers hardly end.
    default_tokens: int | None = None
    max_body_mib: float = 32.0  # MiB of a request; more gets status 413.
    time_limit: float = 600.0  # Seconds that a request may take, waiting included; then it gets status 503.
    graphs: bool = True  # Whether decoding steps are captured in CUDA graphs, on GPUs, before the server answers.
    fuse: bool = True  # Whether the model's decoder layers are compiled for decode, on GPUs, before the server answers.
    # Whether each GPU reads a slice of MLPs and of the output head in steps whose rows all GPUs have.
    split: bool = True
    keep_prefixes: bool = True  # Whether beginnings of requests are kept for later ones that begin alike.
    # Seconds that running requests get to end when the server is told to stop; a supervisor that kills must wait longer.
    grace: float = 10.0
    timeout: float = 300.0  # Seconds after which ranks that wait for each other give up.

    @property
    def max_requests(self) -> int:
        """Maximum of requests that are open, running or waiting."""
        return self.max_running + self.queue

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            # a request without a key would match an empty one, and a header loses the spaces at its end
            what = "one with spaces at an end" if self.api_key.strip() else "an empty one"
            raise ValueError(
                f"api_key must have characters and no spaces around them, got {what}; leave it out for no key"
            )
        if self.host_cache_gib and not self.keep_prefixes:
            raise ValueError(
                f"host_cache_gib must be 0 without keep_prefixes, got {self.host_cache_gib:g}; leave --no-keep-prefixes out"
            )
        if self.name is not None and self.served_model_name:
            raise ValueError(
                f"name must be left out beside served_model_name, got {self.name!r}; add it to those names"
            )
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise ValueError(f"root_path must begin with / and not end with it, got {self.root_path!r}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}; pass another --port")


def parse(arguments: Sequence[str], prog: str, description: str) -> ServeArgs:
    """Return the flags of a command line; exit with a message if one is unknown or out of range."""
    import tyro

    args = tyro.cli(ServeArgs, args=list(arguments), prog=prog, description=description)
    if args.api_key is None and KEY in os.environ:
        return dataclasses.replace(args, api_key=os.environ[KEY])
    return args


def check_host_memory(args: ServeArgs, ranks: int, on_cpu: bool) -> None:
    """Raise Refusal if this machine has less memory than its ranks want for evicted prefixes, or on CPUs for the cache."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    for name in ("host_cache_gib", "cache_gib") if on_cpu else ("host_cache_gib",):
        gib = getattr(args, name) or 0.0
        if gib * ranks > there:
            raise Refusal(
                f"{name} must be at most {int(there / ranks * 10) / 10:g} for {ranks} ranks on a machine of {there:.1f} GiB, "
                f"got {gib:g}; pass another --{name.replace('_', '-')}"
            )


def raise_file_limit(most: int) -> None:
    """Let this process, and those that it starts, open `most` connections; raise Refusal if the system does not allow it."""
    # each takes a file: without one left, a client is cut off
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = most + MAX_CLOSING + OTHER_FILES
    if hard != resource.RLIM_INFINITY and files > hard:
        raise Refusal(
            f"max_connections must be at most {hard - files + most} where a process may open {hard} files, got {most}; "
            "pass another --max-connections, or raise that limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def freeze_gc() -> None:
    """Exclude all existing objects, which live as long as the server, from garbage collection: it would stall the process."""
    gc.collect()
    gc.freeze()


def check_model(path: str) -> None:
    """Raise Refusal for a path without a config.json, or with weights that would have to be unpickled."""
    if path == TINY:
        return
    place = Path(path).expanduser()
    if place.is_dir() and not any(place.glob("*.safetensors")) and any(place.glob("*.bin")):
        raise Refusal(
            f"weights must be safetensors, got *.bin in {path}, which would be unpickled; save the model with transformers again"
        )
    check_place(path, f"{TINY!r}, a config.json or a folder with one")
