"""Run of the training job on one rank: resume, training loop, validation, checkpoints, sample and report."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringattn.launch.common.distributed import Refusal, Session, was_restarted
from ringattn.launch.common.planned_memory import RESERVE, check_fits, least_gpu_bytes
from ringattn.launch.common.session import machine, write_json
from ringattn.launch.train import checkpoint, metrics
from ringattn.launch.train.config import SHAPE, TrainConfig
from ringattn.launch.train.data import NUM_BYTES, Batches, Corpus
from ringattn.launch.train.model import Transformer
from ringattn.launch.train.parallel import make_parallel, mesh_sizes, single_rank
from ringattn.launch.train.pretrained import build_causal_lm, load_tokenizer, read_config_json
from ringattn.launch.train.trainer import StepResult, Trainer, rounding_tolerance
from ringattn.plan.mask import short_mask
from ringattn.sizing import Memory, Savings, load_shape
from ringattn.sizing.memory import heads_of, training_memory
from ringattn.sizing.ring_time import RingCall

TIMER_INTERVAL = 10  # steps between measurements of exposed communication


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Record Ctrl-C in a list instead of raising, so that all ranks can stop after the same step."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def choose_checkpoint(resume: str, out: Path, session: Session) -> Path | None:
    """Return the checkpoint to resume from, the same on every rank, or None for a new run.

    A run that is restarted after a rank died resumes from its own newest one, if it has any. Raises Refusal if the checkpoint
    does not exist or is damaged, or if the folder has checkpoints of another run.
    """
    found = session.broadcast(len(checkpoint.list_checkpoints(out)))
    if resume == "auto" or (found and was_restarted()):
        return checkpoint.find_checkpoint(out, session)
    if resume == "never":
        if found:
            raise Refusal(f"out must hold no checkpoints for a fresh run, got {found} in {out}; pass another --out")
        return None
    if not session.broadcast(Path(resume).is_dir()):
        raise Refusal(f"resume must be auto, never or a checkpoint that exists, got {resume}; look into {out}")
    if damage := checkpoint.find_damage(Path(resume), session):
        raise Refusal(
            f"resume must be an intact checkpoint, got {resume}, which {damage}; look into {out} for another one"
        )
    # a restart before the first save resumes from the newest in out, and the first save removes later ones
    if others := session.broadcast(
        [path.name for path in checkpoint.list_checkpoints(out) if not _is_same_or_earlier(path, Path(resume))]
    ):
        raise Refusal(
            f"out must hold no checkpoints but the one to continue from and earlier ones of its run, got {others[0]} in {out}; "
            "pass another --out, or move them"
        )
    return Path(resume)


def _is_same_or_earlier(path: Path, chosen: Path) -> bool:
    """Return whether a checkpoint is the chosen one, or an earlier one in the same folder."""
    path, chosen = path.resolve(), chosen.resolve()
    return path == chosen or (path.parent == chosen.parent and checkpoint.step_of(path) < checkpoint.step_of(chosen))


def check_continues(config: TrainConfig, corpus: Corpus, facts: dict[str, Any]) -> list[str]:
    """Return the flags that changed since a checkpoint, as text; raise Refusal if the model or the data changed."""
    before, now = facts["config"], dataclasses.asdict(config)
    shape = {*SHAPE, "model"}
    for name in sorted(shape & before.keys()):
        if before[name] != now[name]:
            raise Refusal(
                f"{name} must be {before[name]} as in the checkpoint, got {now[name]}; "
                "pass another --out to start afresh"
            )
    if config.model is not None:
        old, new = facts.get("configuration", {}), read_config_json(config.model)
        if changed := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
            changes = ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in changed)
            raise Refusal(
                f"the configuration in {config.model} must be that of the checkpoint, got another one ({changes}); "
                "put it back, or pass another --out to start afresh"
            )
    if facts["data"] != corpus.fingerprint:
        raise Refusal(
            f"data must be the text of the checkpoint, got other ones from {corpus.source}; "
            "pass the --data of the first start, or another --out to start afresh"
        )
    flags = set(before) & set(now) - shape - {"preset", "nproc", "data", "out", "resume", "timeout", "max_restarts"}
    return [f"{name} {before[name]} -> {now[name]}" for name in sorted(flags) if before[name] != now[name]]


def compare_results(
    single: Sequence[StepResult], ring: Sequence[StepResult], world_size: int, dtype: torch.dtype
) -> str:
    """Return a table of the first steps on one rank and on the ring; raise Refusal if they differ by more than rounding."""
    columns = ["loss, 1", f"loss, {world_size}", "difference", "norm, 1", f"norm, {world_size}", "difference"]
    lines = [
        f"first steps on 1 rank and on {world_size} ranks (loss in nats, norm of the gradient)",
        f"{'step':>6}" + "".join(f"{column:>13}" for column in columns),
    ]
    shares = []  # of the tolerance
    for step, (one, many) in enumerate(zip(single, ring, strict=True), start=1):
        cells = []
        for a, b in ((one.loss, many.loss), (one.grad_norm, many.grad_norm)):
            shares.append(abs(a - b) / rounding_tolerance(a, dtype))
            cells.append(f"{a:>13.7f}{b:>13.7f}{b - a:>13.1e}")
        lines.append(f"{step:>6}{''.join(cells)}")
    text = "\n".join(lines)
    if not all(share <= 1 for share in shares):
        raise Refusal(
            f"{text}\nthe ring must equal one rank within rounding, got differences beyond it; "
            "run python -m ringattn.launch.check to see which part is wrong"
        )
    return f"{text}\nequal within rounding"


MLP_ROWS = 16384
"""Rows of an MLP at a time that are proposed where a run does not fit."""


def planned_memory(config: TrainConfig, dp: int, cp: int, schedule: str = "fused") -> Memory:
    """Return the memory of a rank that the planner expects of a run on GPUs.

    Raises:
        ValueError: The planner does not know the shape of the model of transformers.
    """
    shape = config.shape() if config.model is None else load_shape(config.model)
    sequences = config.batch_size // (config.accumulate * dp)
    window = None if config.window is None else (config.window - 1, 0)
    mask = short_mask(config.seq_len, causal=True, window=window)
    call = RingCall(mask, cp, heads_of(shape, batch=sequences), schedule=schedule)
    rows = sequences * -(-config.seq_len // cp)
    savings = Savings(config.offload, config.mlp_rows or rows)
    options = {"shards": dp * cp, "recompute": config.recompute, "reserve": RESERVE}
    return training_memory(shape, rows, call, savings=savings, **options)


def check_memory(config: TrainConfig, world_size: int, whole: int) -> str:
    """Return the planned memory of a run in words; raise Refusal if GPUs of `whole` bytes cannot hold one of our own model.

    Plans of models of transformers are not compared with measurements, so they only warn.
    """
    dp, cp = mesh_sizes(config.mesh, world_size)

    def plan(ranks: int = cp, **changes: Any) -> Memory:
        # where the buffers of a fused ring do not fit, the ring takes the stepwise schedule
        one = replace(config, **changes)
        plans = [planned_memory(one, dp, ranks, schedule) for schedule in ("fused", "stepwise")]
        return plans[0] if plans[0].total <= whole else min(plans, key=lambda memory: memory.total)

    tries: dict[str, tuple[str, Sequence[Any]]] = {
        "recompute": ("--recompute {}", ("selective", "full")),
        "offload": ("--offload {}", () if config.recompute == "none" else ("all",)),
        "mlp_rows": ("--mlp-rows {}", (MLP_ROWS,)),
        "accumulate": ("--accumulate {}", (config.batch_size // dp,)),
        "ranks": ("rings of {} ranks", [cp << x for x in range(1, 8)]),
        "seq_len": ("--seq-len {}", [length for x in range(1, 12) if (length := config.seq_len >> x) >= cp]),
    }
    planned, fitting = plan(), list[str]()
    for name, (text, values) in tries.items() if planned.total > whole else ():
        for value in values:
            if (total := plan(**{name: value}).total) <= whole:
                fitting.append(f"{text.format(value)} ({total / 2**30:.1f} GiB)")
                break
    remedy = f"take {' or '.join([*fitting, '--no-check-memory to go on anyway'])}"
    return check_fits(planned, whole, remedy, refuse=config.check_memory and config.model is None)


class Run:
    """State of a run on one rank: flags, data, trainer and progress."""

    def __init__(self, config: TrainConfig, session: Session, corpus: Corpus) -> None:
        self.config, self.session = config, session
        self.out = Path(config.out)
        self.tokenizer: Any = None if config.model is None else load_tokenizer(config.model)
        # read now: the file may change during training
        self._configuration = None if config.model is None else read_config_json(config.model)
        try:
            self.corpus = corpus if self.tokenizer is None else corpus.encoded(self.tokenizer, str(config.model))
            self.batches = Batches(self.corpus.text, config.seq_len, config.batch_size, config.seed)
        except ValueError as error:
            raise Refusal(str(error)) from None
        self.recipe = config.recipe(session.device, self.corpus.separator)
        self.bar: Any = None
        whole = least_gpu_bytes(session)
        if whole is not None:
            try:
                self.print(check_memory(config, session.world_size, whole))
            except ValueError as error:
                self.print(f"memory is not planned: {error}")
        self.checkpoints = checkpoint.Checkpoints(self.out, session)
        # a group per rank, for steps without the others
        self._single: Any = dist.new_group([session.rank], use_local_synchronization=True)
        path = choose_checkpoint(config.resume, self.out, session)
        facts = self._read_facts(path)
        self.start = int(facts["step"]) if facts else 0
        self.single_rank_results = [] if facts else self._single_rank_steps()
        ring = config.timeout, config.virtual_size, config.ring_gib
        self.trainer = Trainer(self.build, self.recipe, make_parallel(session.device, config.mesh, *ring))
        self._count_flops()
        if path is not None:
            state = self.trainer.state()
            self.checkpoints.load_(path, state)
            self.trainer.load_state_(state)
        self.saved = self.start
        self.metrics_log = metrics.MetricsLog(self.out, self.start, writes=session.first)
        clocked = session.device.type == "cuda" and not config.compile
        self._timer = metrics.AttentionTimer(self._single) if clocked else None
        self._unit = "byte" if self.tokenizer is None else "token"

    def build(self) -> nn.Module:
        """Build a new model, which depends on the flags only."""
        if self.config.model is not None:
            vocabulary = NUM_BYTES if self.tokenizer is None else len(self.tokenizer)
            return build_causal_lm(self.config.model, self.config.seed, self.session.device, vocabulary)
        model = Transformer(self.config.shape())
        model.initialise_(self.config.seed)
        return model

    def print(self, text: str) -> None:
        """Print on rank 0, above the progress bar."""
        if not self.session.first:
            return
        if self.bar is None or self.bar.disable:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def _read_facts(self, path: Path | None) -> dict[str, Any] | None:
        """Read the facts of the checkpoint to resume from, if any, and print which flags changed."""
        if path is None:
            return None
        facts = self.session.lead(lambda: checkpoint.read_facts(path))
        assert facts is not None, "a checkpoint has facts"
        # on rank 0, for a file may differ between hosts
        changes = self.session.lead(lambda: check_continues(self.config, self.corpus, facts))
        self.session.say(f"continuing from step {facts['step']} ({path})")
        if changes:
            self.session.say(f"changed since then: {', '.join(changes)}")
        return facts

    def _single_rank_steps(self) -> list[StepResult]:
        """Return the first steps on rank 0 only, on every rank; empty if nothing is compared or its memory is too small."""
        count = min(self.config.compare_steps, self.config.steps)
        if self.session.world_size == 1 or not count:
            return []

        def run() -> list[StepResult]:
            steps: list[StepResult] = []
            trainer: Trainer | None = None
            try:
                trainer = Trainer(
                    self.build, self.recipe, single_rank(self._single, self.session.device, self.config.virtual_size)
                )
                for step in range(count):
                    trainer.seed_dropout(step)
                    steps.append(trainer.step(self.batches.training(step), self.config.lr_at(step)))
            except torch.OutOfMemoryError:
                steps.clear()
                print("one GPU cannot hold this run: its first steps are not compared with one rank", flush=True)
            except FloatingPointError as error:
                raise Refusal(str(error)) from None
            # its memory is no part of the ring's peak
            del trainer
            if self.session.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.session.device)
            return steps

        return self.session.lead(run) or []

    def _count_flops(self) -> None:
        """Count the FLOPs of a token and of a visible pair from one forward of the first batch, over all ranks."""
        windows = self.batches.training(0)
        # compiled code hides its operators
        with torch.compiler.set_stance("force_eager"):
            counted = metrics.count_flops(lambda: self.trainer.evaluate([windows]))
        attention, others = map(sum, zip(*self.session.gather(counted), strict=True))
        self._flops_per_token = others / (windows.shape[0] * (windows.shape[1] - 1))
        self._flops_per_pair = attention / self.trainer.pairs(windows)

    def flops(self, windows: torch.Tensor) -> float:
        """Return the FLOPs of a step: three times its forward, as each product has two in the backward."""
        tokens = windows.shape[0] * (windows.shape[1] - 1)
        return 3 * (self._flops_per_token * tokens + self._flops_per_pair * self.trainer.pairs(windows))

    def print_summary(self) -> None:
        """Print model, mesh, batch and data."""
        config, session = self.config, self.session
        dp, cp = self.trainer.parallel.dp, self.trainer.ring.world_size
        first = next(iter(self.trainer.micro_batches(self.batches.training(0))))
        lengths = [f"{length:,}" for length in sorted(set(session.gather(self.trainer.sharding(first).shard_len)))]
        held = lengths[0] if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
        where = torch.cuda.get_device_name(session.device) if session.device.type == "cuda" else "CPU"
        micro = f" in {config.accumulate} micro-batches" if config.accumulate > 1 else ""
        packed = f", packed to {first.tokens.shape[1]:,}" if config.packs else ""
        self.print(
            f"{self.trainer.num_parameters / 1e6:.2f}M parameters, {str(self.recipe.dtype).removeprefix('torch.')}, "
            f"{session.world_size} rank(s) (dp {dp} x cp {cp}) on {where}, backend {session.backend or 'none'}\n"
            f"context {config.seq_len:,} tokens{packed} ({self.recipe.layout}: {held} per rank), "
            f"batch {config.batch_size}{micro}, {config.steps} steps\n"
            f"{self.corpus.source}: {self.corpus.text.numel() / 1e6:.1f} M tokens in {self.corpus.num_files} file(s), "
            f"{(self.corpus.text.numel() - self.batches.num_training_tokens) / 1e6:.2f} M held out"
        )

    def validate(self, step: int) -> None:
        """Measure and log the validation loss, and plot the losses."""
        loss = self.trainer.evaluate(self.batches.validation(self.config.eval_batches))
        self.metrics_log.add(step=step, validation_loss=loss)
        self.print(f"step {step}: validation loss {loss:.4f}")
        if self.session.first:
            title = f"{self.session.world_size} rank(s), context {self.config.seq_len:,}, {self.config.layout}"
            metrics.plot_losses(self.metrics_log.rows, self.out / "loss.png", title, self._unit)

    def save(self, step: int) -> None:
        """Start to write a checkpoint; `Checkpoints.wait` waits for it."""
        self.metrics_log.flush()
        facts = {"step": step, "data": self.corpus.fingerprint, "config": dataclasses.asdict(self.config)}
        if self.config.model is not None:
            facts["configuration"] = self._configuration
        self.checkpoints.save(step, self.trainer.state(), facts)
        self.saved = step

    def _timed_step(self, step: int, values: Sequence[float]) -> tuple[StepResult, float, float | None]:
        """Run one step; return it with its seconds and the milliseconds of exposed communication, where measured."""
        windows = self.batches.training(step)
        timer = self._timer if (step + 1 - self.start) % TIMER_INTERVAL == 0 else None
        self.trainer.seed_dropout(step)
        began = time.perf_counter()
        with timer or contextlib.nullcontext():
            result = self.trainer.step(windows, self.config.lr_at(step), values)
        seconds = time.perf_counter() - began
        found = self.session.gather(timer.exposed_ms()) if timer else []
        return result, seconds, max((ms for ms in found if ms is not None), default=None)

    def train(self) -> bool:
        """Run the remaining steps; return whether all are done, False when the run was interrupted."""
        from tqdm import tqdm

        config, world_size = self.config, self.session.world_size
        gpu = torch.cuda.get_device_name(self.session.device) if self.session.device.type == "cuda" else ""
        peak_rate = metrics.peak_flops(gpu, self.recipe.dtype)
        peak, ring_results, stopped, done = 0.0, [], False, self.start
        shown = max(1, config.steps // 20)
        disable = None if self.session.first else True  # None: no bar without a terminal
        with (
            tqdm(total=config.steps, initial=self.start, disable=disable, unit="step", dynamic_ncols=True) as self.bar,
            _interrupts() as seen,
        ):
            if not self.start:
                self.validate(0)
            for step in range(self.start, config.steps):
                values = [0.0] * (1 + world_size)
                values[0] = float(bool(seen) or self.session.orphaned)
                values[1 + self.session.rank] = peak = metrics.peak_memory_mib(self.session.device, peak)
                try:
                    result, seconds, exposed = self._timed_step(step, values)
                except FloatingPointError:
                    self.checkpoints.wait()  # raised on every rank: finish the last checkpoint first
                    raise
                speed = config.batch_size * config.seq_len / seconds
                share = None
                if peak_rate:
                    share = metrics.mfu(self.flops(self.batches.training(step)), seconds, world_size, peak_rate)
                stopped, memory = result.sums[0] > 0, result.sums[1:]
                done = step + 1
                self.metrics_log.add(
                    step=done,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=config.lr_at(step),
                    tokens_per_s=round(speed, 1),
                    tokens_per_s_per_rank=round(speed / world_size, 1),
                    step_s=round(seconds, 6),
                    mfu=None if share is None else round(share, 4),
                    exposed_ms=None if exposed is None else round(exposed, 3),
                    peak_memory_mib=[round(value, 1) for value in memory],
                )
                gib = max(memory) / 1024
                status = f"loss {result.loss:.3f}, norm {result.grad_norm:.2f}, {speed:,.0f} tokens/s"
                status += f" ({speed / world_size:,.0f} per rank), {gib:.2f} GiB"
                status += "" if share is None else f", {100 * share:.1f}% MFU"
                self.bar.set_postfix_str(status, refresh=False)
                self.bar.update()
                if self.session.first and self.bar.disable and (done % shown == 0 or done == self.start + 1):
                    self.print(f"step {done}/{config.steps}: {status}")
                if len(ring_results) < len(self.single_rank_results):
                    ring_results.append(result)
                    if len(ring_results) == len(self.single_rank_results):
                        results = self.single_rank_results, ring_results
                        self.print(compare_results(*results, world_size, self.recipe.dtype))
                if stopped:
                    break
                if done % config.eval_interval == 0 or done == config.steps:
                    self.validate(done)
                if done % config.checkpoint_interval == 0 or done == config.steps:
                    self.save(done)
            if stopped and self.saved != done:
                self.save(done)
            self.checkpoints.wait()
        return not stopped

    def sample(self) -> None:
        """Generate text after a few held-out tokens, print it and write it to a file."""
        if not self.config.sample_len:
            return
        prompt = self.batches.prompt(self.config.prompt_len)
        text = self.trainer.generate(prompt, self.config.sample_len, self.config.temperature, self.config.seed)
        before = self._decode(prompt.tolist())
        after = self._decode(text.tolist()).removeprefix(before)
        self.print(f"--- held-out text\n{before.decode(errors='replace')}")
        self.print(f"--- the model continues\n{after.decode(errors='replace')}\n---")
        if self.session.first:
            (self.out / "sample.txt").write_bytes(before + after)

    def _decode(self, tokens: list[int]) -> bytes:
        """Decode tokens; without a tokenizer, tokens that are not bytes are left out."""
        if self.tokenizer is not None:
            return self.tokenizer.decode(tokens).encode()
        return bytes(token for token in tokens if token < NUM_BYTES)

    def report_results(self) -> None:
        """Print losses, memory and output paths, and write result.json."""
        rows = self.metrics_log.rows
        training = [row for row in rows if "loss" in row]
        validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
        if not (self.session.first and training and validation):
            return
        memory: list[float] = []
        if self.start < training[-1]["step"]:
            found = metrics.summarise(rows, self.start)
            memory = found["peak_memory_mib"]
            write_json(self.out / "result.json", {"machine": machine(self.session), "rows": [self._facts() | found]})
        self.print(
            f"loss {training[0]['loss']:.4f} -> {training[-1]['loss']:.4f}, "
            f"validation {validation[0]:.4f} -> {validation[-1]:.4f} nats per {self._unit} over {len(training)} steps\n"
            + (f"peak memory per rank: {', '.join(f'{value:.0f}' for value in memory)} MiB\n" if memory else "")
            + f"log, curve, sample and checkpoints: {self.out}/{{log.jsonl,result.json,loss.png,sample.txt,step-*}}"
        )

    def _facts(self) -> dict[str, Any]:
        config, parallel = self.config, self.trainer.parallel
        named = ("preset", "model", "seq_len", "batch_size", "accumulate", "pack", "recompute", "compile")
        return {
            "bench": "train",
            "world_size": self.session.world_size,
            "dp": parallel.dp,
            "cp": parallel.ring.world_size,
            "parameters": self.trainer.num_parameters,
            "dtype": str(self.recipe.dtype).removeprefix("torch."),
            **{name: getattr(config, name) for name in named},
        }
