"""One run of the training job on one rank: where it starts, the order of events, what is said and kept.

Owns resuming, the comparison with one rank, validation, checkpoints and the sample. Refuses to know how a step is
computed (trainer.py), how files stay whole (checkpoint.py, history.py) and how ranks start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import ringattn
from ringattn.launch.distributed import Rank, Refusal
from ringattn.launch.training.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from ringattn.launch.training.config import Config
from ringattn.launch.training.data import Batches, Corpus
from ringattn.launch.training.history import History, draw_curve
from ringattn.launch.training.model import ModelConfig
from ringattn.launch.training.trainer import StepResult, Trainer, rounding_band, steps_on_one_rank


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C inside adds to the list instead of raising, so that all ranks can stop after the same step."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _peak_mib(device: torch.device, so_far: float) -> float:
    """The most memory this rank has held, MiB: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import psutil

    return max(so_far, psutil.Process().memory_info().rss / 2**20)


def choose_checkpoint(resume: str, out: Path) -> Path | None:
    """The checkpoint a run continues from, or None for a fresh run.

    Args:
        resume: "auto", "never" or a file.
        out: The folder of the run.

    Raises:
        Refusal: The file does not exist, or a fresh run is wanted where checkpoints of another one lie.
    """
    found = list_checkpoints(out)
    if resume == "auto":
        return find_checkpoint(out)
    if resume == "never":
        if found:
            raise Refusal(
                f"out must hold no checkpoints for a fresh run, got {len(found)} in {out}; pass another --out"
            )
        return None
    if not Path(resume).is_file():
        raise Refusal(f"resume must be auto, never or a checkpoint that exists, got {resume}; look into {out}")
    return Path(resume)


def check_continues(config: Config, corpus: Corpus, state: dict[str, Any]) -> list[str]:
    """What changed since a checkpoint, as sentences; refuses what a run cannot continue with.

    Args:
        config: The flags now.
        corpus: The data now.
        state: The state of the checkpoint.

    Raises:
        Refusal: The model or the data is another one.
    """
    before, now = state["config"], dataclasses.asdict(config)
    shape = {field.name for field in dataclasses.fields(ModelConfig)}
    for name in sorted(shape & before.keys()):
        if before[name] != now[name]:
            raise Refusal(
                f"{name} must be {before[name]} as in the checkpoint, got {now[name]}; "
                "pass another --out to start afresh"
            )
    if state["data"] != corpus.fingerprint:
        raise Refusal(
            f"data must be the bytes of the checkpoint, got other ones from {corpus.source}; "
            "pass the --data of the first start, or another --out to start afresh"
        )
    steers = set(before) & set(now) - shape - {"preset", "nproc", "data", "out", "resume", "timeout"}
    return [f"{name} {before[name]} -> {now[name]}" for name in sorted(steers) if before[name] != now[name]]


def comparison(alone: Sequence[StepResult], ringed: Sequence[StepResult], world_size: int, dtype: torch.dtype) -> str:
    """The table of the first steps on one rank and on the ring.

    Args:
        alone: Steps of one rank.
        ringed: The same steps of the ring.
        world_size: Ranks of the ring.
        dtype: Of the computation.

    Returns:
        The table, as text.

    Raises:
        Refusal: A loss or a gradient norm differs by more than rounding; the message holds the table.
    """
    columns = ["loss, 1", f"loss, {world_size}", "difference", "norm, 1", f"norm, {world_size}", "difference"]
    lines = [
        f"first steps on 1 rank and on {world_size} ranks (loss in nats per byte, norm of the gradient)",
        f"{'step':>6}" + "".join(f"{column:>13}" for column in columns),
    ]
    shares = []  # of the allowed difference
    for step, (one, many) in enumerate(zip(alone, ringed, strict=True), start=1):
        cells = []
        for a, b in ((one.loss, many.loss), (one.grad_norm, many.grad_norm)):
            shares.append(abs(a - b) / rounding_band(a, dtype))
            cells.append(f"{a:>13.7f}{b:>13.7f}{b - a:>13.1e}")
        lines.append(f"{step:>6}{''.join(cells)}")
    text = "\n".join(lines)
    if not all(share <= 1 for share in shares):
        raise Refusal(
            f"{text}\nthe ring must equal one rank within rounding, got differences beyond it; "
            "run python -m ringattn.launch.check to see which part is wrong"
        )
    return f"{text}\nequal within rounding"


class Run:
    """One rank's part of a run: the flags, the data and the trainer, and what has happened so far.

    Args:
        config: The flags.
        rank: This rank.
        corpus: The data.
    """

    def __init__(self, config: Config, rank: Rank, corpus: Corpus) -> None:
        self.config, self.rank, self.corpus = config, rank, corpus
        self.out = Path(config.out)
        self.batches = Batches(corpus.text, config.seq_len, config.batch_size, config.seed)
        self.recipe = config.recipe(rank.device)
        self.state = self._find_state()
        self.start = int(self.state["step"]) if self.state else 0
        self.alone = [] if self.state else self._steps_alone()
        self.trainer = Trainer(config.model(), self.recipe, self._ring(None), rank.device, 1 + rank.world_size)
        if self.state:
            self.trainer.load_state_(self.state)
            torch.set_rng_state(self.state["rng"])
        self.state = None
        self.saved = self.start
        self.history = History(self.out, self.start, writes=rank.first)
        self.bar: Any = None

    def say(self, text: str) -> None:
        """Prints on rank 0, above the progress bar."""
        if not self.rank.first:
            return
        if self.bar is None or self.bar.disable:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def _find_state(self) -> dict[str, Any] | None:
        """The state to continue from, the same on every rank; rank 0 chooses."""
        path = self.rank.lead(lambda: choose_checkpoint(self.config.resume, self.out))
        if path is None:
            return None
        state = load_checkpoint(path)
        changes = check_continues(self.config, self.corpus, state)
        if self.rank.first:
            print(f"continuing from step {state['step']} ({path})", flush=True)
            if changes:
                print(f"changed since then: {', '.join(changes)}", flush=True)
        return state

    def _ring(self, group: Any) -> ringattn.Ring:
        return ringattn.Ring(group, timeout=datetime.timedelta(seconds=self.config.timeout))

    def _steps_alone(self) -> list[StepResult]:
        """The first steps as rank 0 makes them alone, known to every rank; empty when there is nothing to compare."""
        count = min(self.config.compare_steps, self.config.steps)
        if self.rank.world_size == 1 or not count:
            return []
        group: Any = dist.new_group([0])  # every rank takes part in making it
        steps: list[StepResult] | None = None
        if self.rank.first:
            batches = [self.batches.training(step) for step in range(count)]
            lrs = [self.config.lr_at(step) for step in range(count)]
            try:
                steps = steps_on_one_rank(
                    self.config.model(), self.recipe, self._ring(group), self.rank.device, batches, lrs
                )
            except torch.OutOfMemoryError:
                print("one GPU cannot hold this run: its first steps are not compared with one rank", flush=True)
            if self.rank.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.rank.device)
        steps = self.rank.broadcast(steps)
        return steps or []

    def introduce(self) -> None:
        """Says what is about to run."""
        config, rank = self.config, self.rank
        held = rank.gather(self.trainer.ring.sharding(config.seq_len, layout=config.layout).shard_len)
        where = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "CPU"
        self.say(
            f"{self.trainer.num_parameters / 1e6:.2f}M parameters, {str(self.recipe.dtype).removeprefix('torch.')}, "
            f"{rank.world_size} rank(s) on {where}, backend {rank.backend}\n"
            f"context {config.seq_len:,} tokens ({config.layout}: {_ranges(held)} per rank), "
            f"batch {config.batch_size}, {config.steps} steps\n"
            f"{self.corpus.source}: {self.corpus.text.numel() / 1e6:.1f} MB in {self.corpus.num_files} file(s), "
            f"{(self.corpus.text.numel() - self.batches.num_training_bytes) / 1e6:.2f} MB held out"
        )

    def validate(self, step: int) -> None:
        """Measures and logs the validation loss, and redraws the curve."""
        loss = self.trainer.evaluate(self.batches.validation(self.config.eval_batches))
        self.history.add(step=step, validation_loss=loss)
        self.say(f"step {step}: validation loss {loss:.4f}")
        if self.rank.first:
            title = f"{self.rank.world_size} rank(s), context {self.config.seq_len:,}, {self.config.layout}"
            draw_curve(self.history.rows, self.out / "loss.png", title)

    def save(self, step: int) -> None:
        """Writes a checkpoint, once the ranks are known to agree."""
        self.trainer.check_replicas()
        self.history.flush()
        if self.rank.first:
            state = self.trainer.state() | {
                "step": step,
                "rng": torch.get_rng_state(),
                "data": self.corpus.fingerprint,
                "config": dataclasses.asdict(self.config),
            }
            save_checkpoint(self.out, step, state)
        self.saved = step

    def train(self) -> bool:
        """Runs the steps that are left.

        Returns:
            Whether all are done; False when the run was interrupted.
        """
        from tqdm import tqdm

        config, world_size = self.config, self.rank.world_size
        peak, ringed, stopped, done = 0.0, [], False, self.start
        shown = max(1, config.steps // 20)
        disable = None if self.rank.first else True  # None: no bar where nobody watches
        with (
            tqdm(total=config.steps, initial=self.start, disable=disable, unit="step", dynamic_ncols=True) as self.bar,
            _interrupts() as seen,
        ):
            if not self.start:
                self.validate(0)
            for step in range(self.start, config.steps):
                began = time.perf_counter()
                told = [0.0] * (1 + world_size)
                told[0] = float(bool(seen) or self.rank.orphaned)
                told[1 + self.rank.index] = peak = _peak_mib(self.rank.device, peak)
                lr = config.lr_at(step)
                result = self.trainer.step(self.batches.training(step), lr, told)
                seconds = time.perf_counter() - began
                speed = config.batch_size * config.seq_len / seconds
                stopped, memory = result.said[0] > 0, result.said[1:]
                done = step + 1
                self.history.add(
                    step=done,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=lr,
                    tokens_per_s=round(speed, 1),
                    step_s=round(seconds, 6),
                    peak_memory_mib=[round(value, 1) for value in memory],
                )
                gib = max(memory) / 1024
                self.bar.set_postfix_str(f"loss {result.loss:.3f}, {speed:,.0f} tokens/s, {gib:.2f} GiB", refresh=False)
                self.bar.update()
                if self.rank.first and self.bar.disable and (done % shown == 0 or done == self.start + 1):
                    self.say(
                        f"step {done}/{config.steps}: loss {result.loss:.4f}, {speed:,.0f} tokens/s, {gib:.2f} GiB"
                    )
                if len(ringed) < len(self.alone):
                    ringed.append(result)
                    if len(ringed) == len(self.alone):
                        self.say(comparison(self.alone, ringed, world_size, self.recipe.dtype))
                if stopped:
                    break
                if done % config.eval_interval == 0 or done == config.steps:
                    self.validate(done)
                if done % config.checkpoint_interval == 0 or done == config.steps:
                    self.save(done)
            if stopped and self.saved != done:
                self.save(done)
        return not stopped

    def sample(self) -> None:
        """Generates text after a few held-out bytes, shows it and keeps it."""
        if not self.config.sample_len:
            return
        prompt = self.batches.prompt(self.config.prompt_len)
        text = self.trainer.generate(prompt, self.config.sample_len, self.config.temperature, self.config.seed)
        before, after = (bytes(part.tolist()) for part in (text[: prompt.numel()], text[prompt.numel() :]))
        self.say(f"--- held-out text\n{before.decode(errors='replace')}")
        self.say(f"--- the model goes on\n{after.decode(errors='replace')}\n---")
        if self.rank.first:
            (self.out / "sample.txt").write_bytes(before + after)

    def conclude(self) -> None:
        """Says what came out and where it lies."""
        training = [row for row in self.history.rows if "loss" in row]
        validation = [row["validation_loss"] for row in self.history.rows if "validation_loss" in row]
        if not (self.rank.first and training and validation):
            return
        memory = [
            round(max(column))
            for column in zip(*(row["peak_memory_mib"] for row in training[self.start :]), strict=True)
        ]
        self.say(
            f"loss {training[0]['loss']:.4f} -> {training[-1]['loss']:.4f}, "
            f"validation {validation[0]:.4f} -> {validation[-1]:.4f} nats per byte over {len(training)} steps\n"
            + (f"peak memory per rank: {', '.join(map(str, memory))} MiB\n" if memory else "")
            + f"log, curve, sample and checkpoints: {self.out}/{{log.jsonl,loss.png,sample.txt,step-*.pt}}"
        )


def _ranges(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
