"""Context parallelism for `transformers.Trainer` and classes derived from it: one mixin, which goes before them in the bases.

Every rank of a ring reads whole batches. They are sharded where the loss is computed, so Trainer counts, logs and evaluates as on
one process. Only public methods and attributes of Trainer are overridden.

Note [Gradient of a loss that every rank computes]
    All ranks compute the same loss of the gathered rows. In the backward a rank receives the sum over ranks of the gradients of
    its rows, so R times the gradient of the loss. The mean over ranks, which DDP and FSDP compute of gradients, is then the
    gradient of one process. Layers behind the gathered rows compute the whole gradient on every rank, and have the same mean.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from ringattn.autograd import num_forwards
from ringattn.integrations.accelerate.context_parallel import (
    FilledBatches,
    StreamReader,
    Uneven,
    check_parallelism,
    make_ring,
    replica_of,
    share_batches,
)
from ringattn.integrations.transformers import register
from ringattn.integrations.transformers.batch import IGNORE_INDEX, RingCollator, shard_batch
from ringattn.integrations.transformers.chunked_loss import enable_chunked_loss
from ringattn.integrations.transformers.model_forward import untraced
from ringattn.integrations.transformers.model_hooks import balancing_loss, check_attention, check_models_of
from ringattn.integrations.transformers.positions import max_learned_positions, rank_end_positions
from ringattn.integrations.transformers.support import NAME, check_supported, inner_model, predicts_in_place
from ringattn.plan.sharding import Sharding
from ringattn.ring import Ring
from ringattn.training import Offload, Offloader, save_memory_, sum_over_ring

_Base = Trainer if TYPE_CHECKING else object
_SMOOTHERS_COUNT = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
"""From transformers 5 on."""
_NOT_CHUNKED = ("label_smoothing_factor", "pooling", "torch_compile", "use_liger_kernel")
_OPTIONS = ("layout", "shift_labels", "pooling", "balance", "pack")


class RingTrainerMixin(_Base):
    """Trainer whose ranks share sequences: all ranks of a ring read the same samples, and each computes its rows of them.

    With more ranks than the ring has, rings are data parallel replicas. Ranks of a ring must be consecutive. Losses, gradients and
    metrics are those of whole sequences.

    Args:
        args: Arguments of the Trainer. A `RingCollator` as data_collator stands for the ring and the options in it.
        ring: The ranks that share a sequence.
        context_parallel_size: Number of consecutive ranks that share a sequence, instead of a ring: the rings are then made here.
        chunked_loss: Whether the loss is computed without the logits of all rows, where nothing needs these
            (`chunked_loss.enable_chunked_loss`, whose errors are raised here).
        recompute: "selective" or "full": the backward computes layers again (`ringattn.training.checkpoint_layers_`), in place of
            `gradient_checkpointing` of the arguments; by default "full" where these ask for it and `offload` is given.
        offload: Layers whose checkpoints wait in host memory, as in `checkpoint_layers_`.
        mlp_rows: Tokens of a rank that go through an MLP at a time, as in `ringattn.training.save_memory_`.
        kwargs: `layout`, `shift_labels`, `pooling`, `balance` and `pack` of `shard_batch`, and arguments of the Trainer.

    Raises:
        ValueError: No ring is given, or two; its ranks are not consecutive, or an option would weight the ranks wrongly; or
            another rank of the ring failed to make its trainer, or makes one for another model. In use: a sequence is longer than
            the learned positions.
        NotImplementedError: An option is not supported among ranks that share a sequence; the message names it. At the first
            batch: the model averages the loss over the labels of a shard.
        RuntimeError: The model does not attend with ringattn, or in training: it did not.
    """

    accelerator: Any
    loss_by_model: ClassVar[bool] = True
    """Whether the model computes the loss, which must then divide by num_items_in_batch."""
    uneven_evaluation: ClassVar[Uneven] = "last"
    """What is done with samples to evaluate that are not full batches for each of several rings."""
    offloader: Offloader | None = None
    """Host memory of checkpoints, where `offload` is given."""

    def __init__(
        self,
        *args: Any,
        ring: Ring | None = None,
        context_parallel_size: int | None = None,
        chunked_loss: bool = False,
        recompute: str | None = None,
        offload: Offload = False,
        mlp_rows: int | None = None,
        **kwargs: Any,
    ) -> None:
        register()
        given = [*args, *kwargs.values()]
        arguments = next((x for x in given if isinstance(x, TrainingArguments)), None)
        # the environment of a launcher, read here, starts the process group
        _ = PartialState() if arguments is None else arguments.device
        instead = f"context_parallel_size={{size}} to {type(self).__name__}"
        check_parallelism(getattr(arguments, "parallelism_config", None), instead)
        collator = next((x for x in given if isinstance(x, RingCollator)), None)
        sources = {"ring": ring, "context_parallel_size": context_parallel_size, "a RingCollator": collator}
        named = [name for name, x in sources.items() if x is not None]
        if len(named) != 1:
            raise ValueError(
                f"{type(self).__name__} must get its ring from one argument, got {' and '.join(named) or 'none'}; pass "
                "context_parallel_size=N, or ring=Ring(...), or a RingCollator as data_collator"
            )
        self._options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        if collator is not None:
            ring, self._options = collator.ring, collator.options
            args = tuple(collator.collator if x is collator else x for x in args)
            kwargs = {name: collator.collator if x is collator else x for name, x in kwargs.items()}
        self.ring = make_ring(context_parallel_size or 1) if ring is None else ring
        self._loss_checked = self.ring.world_size == 1 or not self.loss_by_model
        self._last_samples: int | None = None
        self._readers: int | None = None  # rings that have different samples to evaluate; None: all
        self._filled: FilledBatches | None = None
        self._counts: list[int] | None = None
        self._evaluated = 0
        self._tokens_shape: tuple[int, ...] = ()
        self._sharding: Sharding | None = None
        # ranks wait for each other where models are wrapped, also for one whose options were refused
        with self.ring.propagate_errors():
            if self.ring.world_size > 1 and arguments is not None:
                check_supported(arguments, "shared training")
                _name_attention(arguments, given, kwargs)
            super().__init__(*args, **kwargs)
            if self._options.get("shift_labels") is None:
                self._options = {**self._options, "shift_labels": not predicts_in_place(cast(nn.Module, self.model))}
            self._chunked = chunked_loss
            if chunked_loss:
                self._enable_chunked_loss()
            if recompute is not None or offload is not False or mlp_rows is not None:
                self._save_memory(recompute, offload, mlp_rows)
            replica_of(self.ring, self.args.world_size, self.args.process_index)
            check_supported(self, "trainer")
            if self.ring.world_size > 1:
                check_supported(self, "shared trainer")
                check_models_of(cast(nn.Module, self.model))
                self._check_evaluations()
                if self.args.use_liger_kernel and (self.label_smoother or self.modules_with_whole_outputs()):
                    raise NotImplementedError(
                        "use_liger_kernel must come with RingTrainer or RingSFTTrainer and without label_smoothing_factor where "
                        f"ranks share a sequence, got it with {type(self).__name__}, which takes its loss from other outputs than "
                        "Liger's; leave one out. The trainers of TRL compute their heads by chunks without it"
                    )
                if self.neftune_noise_alpha is not None:
                    self.add_callback(WholeNoise(self, self.neftune_noise_alpha))
                    self.neftune_noise_alpha = None  # else Trainer scales noise by the rows of a rank
        self.ring.assert_equal_across_ranks("the model of a RingTrainer", type(self.model).__name__)
        self._max_positions = max_learned_positions(self.model)
        if self.label_smoother is not None and not self._options.get("pooling"):
            self.label_smoother = ShiftedLabelSmoother(self.args.label_smoothing_factor)
        self.add_callback(TokensSeen(self.ring.world_size))
        self._whole_outputs = [shard_calls(module, self.shard) for module in self.modules_with_whole_outputs()]

    def modules_with_whole_outputs(self) -> list[nn.Module]:
        """Return the modules whose outputs the loss needs whole; none where the loss is a sum over tokens of each rank."""
        return []

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's rows of a whole batch, as `shard_batch` does; raise when a model has not learned so many positions."""
        part = shard_batch(batch, self.ring, **self._options)
        tokens = batch.get("input_ids")
        self._sharding, self._tokens_shape = part["sharding"], () if tokens is None else tuple(tokens.shape)
        longest = max(rank_end_positions(part["sharding"]), default=0)
        if self._max_positions is not None and longest > self._max_positions:
            raise ValueError(
                f"sequences must be of at most {self._max_positions} tokens, the positions that {type(self.model).__name__} "
                f"has learned, got one of {longest}; cut them, or train a model with rotary positions"
            )
        return part

    def get_train_dataloader(self) -> DataLoader:
        """Return Trainer's, with the same samples and worker seeds on all ranks of a ring."""
        with self._rings_read():
            dataloader = super().get_train_dataloader()
        dataloader = self._share(dataloader)
        loader: Any = getattr(dataloader, "base_dataloader", dataloader)
        seed = loader.worker_init_fn
        if isinstance(seed, partial) and "rank" in seed.keywords:
            replica = self.args.process_index // self.ring.world_size
            loader.worker_init_fn = partial(seed.func, *seed.args, **{**seed.keywords, "rank": replica})
        return dataloader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return Trainer's, with the same samples on all ranks of a ring, and each sample in one batch, as on one process."""
        with self._rings_read():
            dataloader = super().get_eval_dataloader(eval_dataset)
        return self._share(dataloader, uneven=self.uneven_evaluation)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return Trainer's, as `get_eval_dataloader` does."""
        with self._rings_read():
            dataloader = super().get_test_dataloader(test_dataset)
        return self._share(dataloader, uneven=self.uneven_evaluation)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of a step: those of all rings."""
        return super().get_total_train_batch_size(args) // self.ring.world_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this rank's share of Trainer's count."""
        return super().floating_point_ops(inputs) // self.ring.world_size

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run Trainer's on what each rank has of a short last batch; the loss is that of whole sequences."""
        self._keep_all_ranks()
        # Trainer gathers it where it logs, but not what is left at the end, for train_loss
        return self._whole_loss(super().training_step(*args, **kwargs))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute Trainer's loss of this rank's rows, or of whole outputs; raise for a model that does not attend with ringattn.

        Outputs, if wanted, are those of this rank's rows.
        """
        if not self._whole_outputs:
            count = num_items_in_batch
            if "sharding" not in inputs:
                inputs = {
                    **self.shard(inputs),
                    **({"chunked_loss": True} if self._chunked and not return_outputs else {}),
                }
                # every rank of a ring has counted all labels of the ring
                count = None if count is None else count / self.ring.world_size
            elif "num_items_in_batch" in inputs:
                # an evaluation, whose batches are averaged one by one: some releases count none, others those of all rings;
                # losses are multiplied by the number of processes
                count = inputs["num_items_in_batch"] * self.args.world_size
            if not self._options.get("pooling"):
                num_items_in_batch = count
            elif self.label_smoother is None or not _SMOOTHERS_COUNT:
                # a head that chooses rows has the whole loss on every rank, a mean over sequences
                num_items_in_batch = None
            if isinstance(self.label_smoother, ShiftedLabelSmoother):
                scaled = self.model_accepts_loss_kwargs or not self.loss_by_model
                self.label_smoother.num_items = count if scaled else inputs["num_items_in_batch"]
            elif not self._loss_checked and inputs.get("num_items_in_batch", 0) != 0:
                self._check_count(model, inputs, count)
        before = num_forwards()
        shared = self.loss_by_model and self.ring.world_size > 1
        result: Any = super().compute_loss(model, inputs, return_outputs or shared, num_items_in_batch)
        check_attention(cast(nn.Module, self.model), before)
        if not shared:
            return result
        loss, outputs = result
        # Trainer multiplies the whole loss by the number of processes, and this part is whole on every rank of a ring
        balance = self._balance(outputs, num_items_in_batch)
        loss = loss if balance is None else loss - balance * (1 - 1 / self.ring.world_size)
        return (loss, outputs) if return_outputs else loss

    def _balance(self, outputs: Any, num_items_in_batch: Any) -> Tensor | None:
        """Return the part of a loss that balances experts, as Trainer has multiplied it; None where there is none."""
        if self.label_smoother is not None:
            return None
        balance = balancing_loss(cast(nn.Module, self.model), outputs)
        scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return balance * self.args.world_size if balance is not None and scaled else None

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Run Trainer's; loss, logits and labels are those of whole sequences, on every rank of a ring."""
        self._keep_all_ranks()
        if self._filled is not None:
            self._counts = self._filled.counts(self._evaluated)
            self._evaluated += 1
        if self._whole_outputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        # here already: Trainer calls a model whose labels it does not know without compute_loss
        part = {**self.shard(inputs), **({"chunked_loss": True} if self._chunked and prediction_loss_only else {})}
        sharding: Sharding = part["sharding"]

        def unshard(x: Tensor) -> Tensor:
            if x.dim() <= 2 or x.shape[1] != sharding.shard_len:
                return x
            whole, tokens = sharding.unshard(x, dim=1), inputs.get("input_ids")
            one_row = tokens is not None and len(whole) == 1 and tokens.numel() == whole.shape[1]
            return whole.view(*tokens.shape, *whole.shape[2:]) if one_row and tokens is not None else whole

        loss, logits, labels = super().prediction_step(model, part, prediction_loss_only, ignore_keys)
        wanted = part.get("shift_labels", part.get("labels"))
        if loss is not None:
            loss = self._whole_loss(loss)
        if loss is not None and wanted is not None and self.loss_by_model and not self._options.get("pooling"):
            # a mean over no labels is no number, which Trainer leaves out of its own
            labelled = sum_over_ring(wanted.ne(IGNORE_INDEX).any().to(loss), self.ring)
            loss = torch.where(labelled > 0, loss, math.nan)
        logits = None if logits is None else recursively_apply(unshard, logits)
        return loss, logits, None if labels is None else inputs["labels"]

    def _whole_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of whole sequences, the mean of those of ranks."""
        if self._whole_outputs or self.ring.world_size == 1:
            return loss
        return sum_over_ring(loss, self.ring) / self.ring.world_size

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's, which gathers the predictions of one rank of each ring."""
        if self.ring.world_size > 1:
            self.gather_function = self._gather_rings
        dataloader: Any = kwargs.get("dataloader", args[0] if args else None)
        sampler = getattr(dataloader, "batch_sampler", None)
        batches = getattr(sampler, "batch_sampler", None)
        self._readers = getattr(sampler, "num_processes", None)
        if not isinstance(batches, FilledBatches):
            return super().evaluation_loop(*args, **kwargs)
        # metrics of TRL leave out batches that are read again
        self._filled, self._evaluated, self.accelerator.gather_for_metrics = batches, 0, self._gather_counted
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._filled = self._counts = None
            del self.accelerator.gather_for_metrics
            self.gather_function = self.accelerator.gather_for_metrics

    def _gather_rings(self, data: Any, **_: Any) -> Any:
        """Return the predictions of all readers, in the order of samples; each rank of a ring has the same."""

        def gather(x: Tensor) -> Tensor:
            every = self.accelerator.gather(x).view(-1, self.ring.world_size, *(x.shape or (1,)))
            found = every[: self._readers, 0].flatten(0, 1)
            # Trainer has losses for full batches, and router logits have more rows than samples
            return found[: self._last_samples] if x.dim() < 2 else found

        return (
            recursively_apply(gather, data)
            if self._counts is None
            else self._gather_counted(data, self.ring.world_size)
        )

    def _gather_counted(self, data: Any, step: int = 1, **_: Any) -> Any:
        """Return what each step-th process has of samples that are counted, in the order of processes."""
        assert self._counts is not None, "set by prediction_step"
        counts = [count for count in self._counts for _ in range(self.ring.world_size)]

        def gather(x: Tensor) -> Tensor:
            x = x.reshape(x.shape or (1,))
            # a ring may have fewer samples
            every = self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=0, pad_index=-100))
            parts = every.unflatten(0, (len(counts), -1))
            return torch.cat([part[:count] for part, count in list(zip(parts, counts, strict=True))[::step]])

        return recursively_apply(gather, data)

    def _check_evaluations(self) -> None:
        """Raise now where rings cannot share the samples that are evaluated in training, and not at the first evaluation."""
        sets = getattr(self, "eval_dataset", None)
        if sets is not None and self.args.eval_strategy != "no":
            for name in sets if isinstance(sets, dict) else [None]:
                self.get_eval_dataloader(name)

    def _enable_chunked_loss(self) -> None:
        options = {**vars(self.args), **self._options}
        unfit = {name: x for name in _NOT_CHUNKED if (x := options.get(name))}
        if not self.loss_by_model or unfit:
            raise ValueError(
                f"chunked_loss must be left out of {type(self).__name__} with {unfit or 'a loss of its own'}, got True; it is for "
                "the loss of the next token of a model that is not compiled, so drop one"
            )
        enable_chunked_loss(self.model)  # pyright: ignore[reportArgumentType]

    def _save_memory(self, recompute: str | None, offload: Offload, mlp_rows: int | None) -> None:
        args: Any = self.args
        fsdp = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
        others = {
            "torch_compile": args.torch_compile,
            "activation_offloading": getattr(args, "activation_offloading", False),
        }
        others["activation_checkpointing of fsdp_config"] = fsdp.get("activation_checkpointing", False)
        if unfit := [name for name, x in others.items() if x]:
            raise ValueError(
                f"recompute, offload and mlp_rows of {type(self).__name__} must come without {', '.join(unfit)}, got both; drop one"
            )
        # releases before 5.24 have the second name alone
        asked = [x for x in ("activation_checkpointing", "gradient_checkpointing") if getattr(args, x, False)]
        if recompute is None:
            recompute = "full" if asked and offload is not False else "none"
        inner: Any = inner_model(self.model)
        if recompute != "none" and asked:
            # those of the layers are computed again here
            self.args = copy.copy(args)
            for name in asked:
                setattr(self.args, name, False)
            getattr(inner, f"{asked[0]}_disable")()
        self.offloader = save_memory_(inner, recompute=recompute, offload=offload, mlp_rows=mlp_rows)

    def _keep_all_ranks(self) -> None:
        """Let `gather_for_metrics` keep what each rank has of a short last batch, which is not padded with other samples."""
        self._last_samples, state = None, self.accelerator.gradient_state
        if self.ring.world_size > 1 and state.end_of_dataloader and state.remainder > 0:
            self._last_samples, state.active_dataloader.remainder = state.remainder, 0

    def _check_count(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> None:
        """Raise unless the model divides its loss by the labels of all ranks (Note [Loss of a shard] of batch.py).

        Many models accept num_items_in_batch and ignore it: encoders, and token classifiers. So the first batch is tried with
        twice the number, for which the loss must be half as large.
        """
        tried = []
        for times in (1, 2):
            more = {**inputs, "num_items_in_batch": times * inputs["num_items_in_batch"]}
            # the dropout of training stays the same without a trial
            with torch.no_grad(), torch.random.fork_rng([self.args.device] if self.args.device.type == "cuda" else []):
                loss: Any
                loss, outputs = super().compute_loss(model, more, True, times * num_items_in_batch)
                balance = self._balance(outputs, num_items_in_batch)
                tried.append(float(loss) - (0.0 if balance is None else float(balance)))
        # a rank without labels has a loss of 0, and passes
        halved = not abs(tried[0] - 2 * tried[1]) > abs(tried[0]) / 4
        if not self.ring.all_reduce_min(int(halved)):
            raise NotImplementedError(
                "the loss must be divided by num_items_in_batch where ranks share a sequence, got that of "
                f"{type(self.model).__name__}, which is averaged over the labels of each rank; train this model on one process, or "
                "let its forward divide the sum by num_items_in_batch"
            )
        self._loss_checked = True

    @contextmanager
    def _rings_read(self) -> Iterator[None]:
        """Let the trainer's accelerator prepare streams for rings."""
        before = self.accelerator
        if self.ring.world_size > 1:
            self.accelerator = StreamReader(before, self.ring)
        try:
            yield
        finally:
            self.accelerator = before

    def _share(self, dataloader: DataLoader, uneven: Uneven = "twice") -> DataLoader:
        if self.ring.world_size > 1 and isinstance(dataloader.dataset, IterableDataset):
            if uneven != "twice" and self.ring.world_size < self.args.world_size:
                raise NotImplementedError(
                    "samples to evaluate must have a length where several rings share them, got "
                    f"{type(dataloader.dataset).__name__}, of which some would count twice; take samples of the stream into a "
                    "list before, or evaluate with one ring"
                )
            return dataloader  # of a StreamReader
        return share_batches(dataloader, self.ring, self.args.world_size, self.args.process_index, uneven=uneven)


def _name_attention(arguments: Any, given: list[Any], kwargs: dict[str, Any]) -> None:
    """Let TRL make a model that is given as a path with ringattn, unless its arguments name another attention."""
    named = isinstance(kwargs.get("model", given[0] if given else None), str)
    if named and hasattr(arguments, "model_init_kwargs"):
        arguments.model_init_kwargs = {"attn_implementation": NAME, **(arguments.model_init_kwargs or {})}


def shard_calls(module: nn.Module, shard: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[RemovableHandle, ...]:
    """Register forward hooks that `shard` the batch of each call, and gather the rows of its outputs; return their handles.

    Of the outputs, `b s ...` tensors with three or more dims become `b n ...`; in a call with labels also those `b s`, one number
    per predicted token, which become `b (n - 1)` as without shards. A loss in the outputs stays that of a shard.
    """
    names = list(inspect.signature(module.forward).parameters)

    def shard_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        batch = {name: call.pop(name) for name, x in list(call.items()) if isinstance(x, Tensor)}
        return (), {**call, **shard(batch)}

    def gather_outputs(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        sharding, shifted = kwargs["sharding"], "shift_labels" in kwargs
        for name, x in list(output.items()):
            if not isinstance(x, Tensor) or x.dim() < (2 if shifted else 3) or x.shape[1] != sharding.shard_len:
                continue
            whole = sharding.unshard(x, dim=1)
            output[name] = whole if x.dim() > 2 else whole[:, :-1]
        return output

    return (
        module.register_forward_pre_hook(untraced(shard_inputs), with_kwargs=True),
        module.register_forward_hook(untraced(gather_outputs), with_kwargs=True),
    )


class WholeNoise(TrainerCallback):
    """NEFTune on a ring: while a trainer trains, rows of embeddings get this rank's share of the noise of whole sequences.

    Every rank draws all of it, so ranks whose generators are in the same state add what one process adds.
    """

    def __init__(self, trainer: RingTrainerMixin, alpha: float) -> None:
        self._trainer, self._alpha = trainer, alpha
        self._handle: RemovableHandle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Register the hook of the embeddings."""
        embeddings: Any = inner_model(self._trainer.model).get_input_embeddings()
        self._handle = embeddings.register_forward_hook(untraced(self._add))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Remove it."""
        if self._handle is not None:
            self._handle.remove()

    def _add(self, module: nn.Module, _: Any, rows: Tensor) -> Tensor:
        trainer, sharding = self._trainer, self._trainer._sharding
        if not module.training or sharding is None:
            return rows
        whole = (*(trainer._tokens_shape or (rows.shape[0], sharding.seq_len)), rows.shape[-1])  # b n d
        most = self._alpha / (whole[1] * whole[2]) ** 0.5
        noise = torch.empty(whole, dtype=rows.dtype, device=rows.device).uniform_(-most, most)
        if rows.shape[1] == sharding.shard_len:
            noise = noise.view(len(rows), -1, whole[2])  # documents of several rows come in one
            noise = sharding.shard(nn.functional.pad(noise, (0, 0, 0, sharding.seq_len - noise.shape[1])), dim=1)
        return rows + noise


@dataclass
class ShiftedLabelSmoother:
    """Label smoothing of rows whose labels are shifted already: in place of transformers' LabelSmoother, with its formula."""

    epsilon: float
    num_items: Any = None

    def __call__(self, model_output: Any, labels: Tensor, **_: Any) -> Tensor:
        """Return the smoothed sum over this rank's labels `b s`, divided by `num_items`."""
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        flat, options = (logits.flatten(0, 1), labels.flatten()), {"label_smoothing": self.epsilon, "reduction": "sum"}
        return nn.functional.cross_entropy(*flat, ignore_index=IGNORE_INDEX, **options) / self.num_items


class TokensSeen(TrainerCallback):
    """Corrects `state.num_input_tokens_seen`, which Trainer sums over ranks that have read the same tokens."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._seen = ranks, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Go on from the number of a checkpoint."""
        self._seen = state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the tokens of the last batch once per ring."""
        self._seen += (state.num_input_tokens_seen - self._seen) // self._ranks
        state.num_input_tokens_seen = self._seen

    on_substep_end = on_step_end


class RingTrainer(RingTrainerMixin, Trainer):
    """Trainer whose ranks share sequences; arguments, beside Trainer's own, and errors are those of `RingTrainerMixin`.

    Example:
        >>> RingTrainer(model, args, train_dataset=dataset, context_parallel_size=2).train()  # doctest: +SKIP
    """
