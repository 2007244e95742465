"""Sharding of batches: each rank's rows of every entry, and the number of labels of the whole batch.

Note [Loss of a shard]
    A model averages the loss over the labels of its input, and ranks have different numbers of labels. So the batch contains a
    count: labels of the whole batch, divided by ranks. A model divides its sum by `num_items_in_batch`. The mean over ranks, which
    DDP and FSDP compute of gradients, is then the loss of one process, however labels are distributed. A count that the caller
    gives is that of transformers, of whole batches, and is divided by ranks too. `Trainer` adds its own count, over gradient
    accumulation too, and multiplies by the number of ranks, with the same result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ringattn.integrations.transformers.masks import read_boundaries
from ringattn.integrations.transformers.model_hooks import watch_models
from ringattn.integrations.transformers.positions import read_cumulative, read_documents
from ringattn.integrations.transformers.support import IMAGE_KEYWORDS, check_supported
from ringattn.integrations.transformers.trees import IGNORE_INDEX, check_tree_batch
from ringattn.plan.expressions import Mask, Tree
from ringattn.plan.sharding import SAME_SEQUENCE, Sharding, positions_in_documents
from ringattn.ring import Ring
from ringattn.sizing.packing import PackedSequence, place
from ringattn.tensor_checks import digest_bits

COMPARED = 2
"""First batches of a ring that ranks compare before they are sharded; later ones are compared beside attention calls."""

_ROWS = ("input_ids", "inputs_embeds", "token_type_ids")
_KEPT = ("output_hidden_states", "return_dict", "return_loss")
_COMPARED = (*_ROWS, "labels", "shift_labels", "position_ids", "attention_mask")
_CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
_HANDLED = (
    *("labels", "shift_labels", "position_ids", "attention_mask", "max_length_q", "max_length_k"),
    *("use_cache", "seq_idx", "packed", "num_items_in_batch"),
)

_compared: weakref.WeakKeyDictionary[Ring, int] = weakref.WeakKeyDictionary()


def shard_batch(
    batch: Mapping[str, Any],
    ring: Ring,
    layout: str = "zigzag",
    *,
    shift_labels: bool | None = None,
    pooling: bool = False,
    balance: dict[str, Any] | Mask | None = None,
    tree: Tree | None = None,
    pack: bool = False,
) -> dict[str, Any]:
    """Return this rank's shard of a batch, to call a model with: `model(**shard_batch(batch, ring))`.

    Every rank of the ring passes the same batch. Ranks compare tokens and labels: those of the first two batches of a ring here,
    unless this is the worker of a DataLoader, and those of every batch beside the attention calls of its model
    (`Sharding.for_batch`). So all ranks make the same calls.

    Average losses and gradients over the ranks of the ring, as DDP and FSDP do (Note [Loss of a shard]).

    A batch that would leave a rank without a row, as one of fewer tokens than ranks, is laid out contiguously, with rows at the
    end that count for nothing and that `sharding.unshard` leaves out. Where rows of the batch have different documents, it becomes
    one row of all tokens, in their order, and so do the outputs of the model.

    Args:
        batch: Output of a collator: `input_ids` `b n` or `inputs_embeds` `b n e`, and any of `labels`, `shift_labels`,
            `position_ids` (`b n` or `1 n`), `attention_mask` (`b n`), `token_type_ids`, `cu_seq_lens_q`, `cu_seq_lens_k`,
            `max_length_q`, `max_length_k`. Without an attention mask, positions that restart mean packed documents. For M-RoPE
            `position_ids` may also be `3 b n`, or `4 b n` with those of the text first. `num_items_in_batch`: what transformers
            means by it, the number by which one process would divide the sum over this batch; default its labels. Pass that of
            a step with several micro-batches, or rings (`labels_per_ring`).
        ring: The ranks that share the sequence.
        layout: As in `ring.sharding`: "zigzag", "contiguous", "striped" or "balanced".
        shift_labels: Whether the model predicts the next token; False for models that predict tokens in place, as encoders. None:
            True here. A trainer, which knows the model, then decides by its head.
        pooling: Whether the model has a head that chooses rows of the whole sequence (sequence classification, rewards): labels
            are then one per sequence, and the loss is the same on every rank.
        balance: As in `ring.sharding`: the mask to balance for; with a tree and the layout "balanced" by default the tree.
        tree: The tokens are nodes of this tree (Note [Trees of tokens] of trees.py), as `pack_answers` makes them.
        pack: Place packed documents over the ranks such that all finish together, in place of a layout (`ringattn.sizing.pack`).
            A collator may return its own placement as the entry `packed`.

    Returns:
        This rank's rows of the tokens, their global `position_ids`, `labels` and `shift_labels` as `labels` shifted before
        sharding, the `attention_mask` of the whole sequence, `num_items_in_batch`, `use_cache` False, and `sharding`. With images
        or pooling the tokens are those of the whole sequence, of which the model takes its rows (Note [Whole inputs] of
        model_hooks.py).

    Raises:
        ValueError: Entries do not fit each other, ranks pass different tokens or labels, or a rank would get no row of images, of a
            tree or of a head with pooling. Other ranks raise it when they compare their next call.
        NotImplementedError: An entry cannot be sharded.

    Example:
        >>> ids = torch.arange(6)[None]
        >>> part = shard_batch({"input_ids": ids, "labels": ids}, Ring())
        >>> part["labels"].tolist(), part["num_items_in_batch"].item()
        ([[1, 2, 3, 4, 5, -100]], 5.0)
    """
    watch_models()
    images = sorted(name for name in IMAGE_KEYWORDS if batch.get(name) is not None)
    with ring.propagate_errors():
        check_supported(ring, "ring")
        _check_entries(batch)
        tokens = batch["inputs_embeds"] if batch.get("input_ids") is None else batch["input_ids"]
        b, n = tokens.shape[:2]
        if pooling:
            _check_pooled(batch, b, n)
        for name in ("token_type_ids", "attention_mask", *(() if pooling else ("labels", "shift_labels"))):
            entry = batch.get(name)
            if entry is not None and tuple(entry.shape) != (b, n):
                raise ValueError(
                    f"{name} must have the shape of the tokens, {(b, n)}, got {tuple(entry.shape)}; for labels of sequences pass "
                    "pooling=True"
                )
        positions = batch.get("position_ids")
        several = positions is not None and positions.dim() == 3 and len(positions) in (3, 4)
        if positions is not None and (
            positions.dim() != 2 + several or positions.shape[-2] not in (1, b) or positions.shape[-1] != n
        ):
            raise ValueError(
                f"position_ids must have shape {(b, n)}, {(1, n)}, {(3, b, n)} or {(4, b, n)}, got {tuple(positions.shape)}; "
                "leave them out, or pass what the processor made"
            )
        if positions is not None and several:
            # those of text are equal: then they are documents too
            apart, mask = positions != positions[0], batch.get("attention_mask")
            several = bool((apart if mask is None else apart & mask.to(torch.bool)).any())
            positions = positions if several else positions[0]
        whole_inputs = [*images, *(["pooling"] if pooling else []), *(["tree"] if tree is not None else [])]
        if not (several or whole_inputs or batch.get("cu_seq_lens_q") is not None) and _differ_in_documents(batch):
            options: Any = {"shift_labels": shift_labels, "balance": balance, "pack": pack}
            return shard_batch(_in_one_row(batch, shift_labels is not False), ring, layout, **options)
        text = positions if not several else positions[0] if positions is not None and len(positions) == 4 else None
        documents = None if tree is not None else _documents(batch, text, n)
        if tree is not None:
            check_tree_batch(batch, tree, n)
            positions = torch.tensor(tree.positions, device=tokens.device)[None]
            balance = tree if balance is None and layout == "balanced" else balance
        packed = batch.get("packed")
        if packed is None and pack and documents is not None:
            lengths = [stop - start for start, stop in pairwise(documents) if start < stop]
            packed = place(lengths, cp=ring.world_size, keep_order=True).sequences[0]
        if packed is None:
            sharding = ring.sharding(n, layout, documents, balance=balance, device=tokens.device)
        else:
            sharding = _packed_sharding(packed, ring, n, documents, tokens.device)
        if documents is not None and b > 1 and positions is None:
            raise NotImplementedError(
                f"packed documents must come in one row, got {b}; flatten the batch, as DataCollatorWithFlattening does"
            )
        if shift_labels is False and batch.get("shift_labels") is not None:
            raise ValueError(
                "shift_labels must be left out of a batch whose labels are not shifted, got both; drop one"
            )
        if not all(sharding.shard_lens):
            batch, positions, sharding = _with_a_row_per_rank(batch, positions, sharding, tokens, whole_inputs)
            documents, n = sharding.documents, sharding.seq_len
    sharding = _compared_by(ring, batch, images, sharding)
    given = {name: x for name, x in batch.items() if x is not None}
    kept = {*_KEPT, *images, "attention_mask", *(("labels",) if pooling else ())}
    part: dict[str, Any] = {name: x for name, x in given.items() if name in kept}
    whole = pooling or bool(images)
    part |= {name: x if whole else sharding.shard(x, dim=1) for name, x in given.items() if name in _ROWS}
    if positions is None and not images:  # a model with images counts in its own way
        positions = positions_in_documents(torch.arange(n, device="cpu"), documents or (0,)).to(tokens.device)[None]
    if positions is not None:
        part["position_ids"] = positions if whole else sharding.shard(positions, dim=positions.dim() - 1)
    counted = batch.get("num_items_in_batch")
    if counted is not None:
        # of one label per sequence, which models refuse, it stays what it is
        part["num_items_in_batch"] = counted if pooling else counted / ring.world_size
    part |= {"gather_outputs": True} if pooling else _labels(batch, sharding, shift_labels is not False, tree)
    part |= {} if tree is None else {"tree": tree}
    return {**part, "use_cache": False, "sharding": sharding}


def _differ_in_documents(batch: Mapping[str, Any]) -> bool:
    """Return whether positions restart at different places in the rows of a batch without an attention mask."""
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or len(positions) == 1 or batch.get("attention_mask") is not None:
        return False
    starts = positions.diff(dim=-1) != 1
    return bool((starts != starts[:1]).any())


def _in_one_row(batch: Mapping[str, Any], shift: bool) -> dict[str, Any]:
    """Return a batch of documents with all tokens in one row; labels are shifted before, because the rows meet there."""
    found = dict(batch)
    if shift and found.get("labels") is not None and found.get("shift_labels") is None:
        found["shift_labels"] = torch.nn.functional.pad(found["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    # a row begins a document, whatever its positions
    starts = torch.nn.functional.pad(batch["position_ids"].diff(dim=-1) != 1, (1, 0), value=True).flatten()
    edges = torch.nn.functional.pad(starts.nonzero()[:, 0], (0, 1), value=len(starts))
    for name in (*_ROWS, "labels", "shift_labels", "position_ids"):
        if found.get(name) is not None:
            found[name] = found[name].flatten(0, 1)[None]
    return {**found, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges}


def labels_per_ring(
    batches: Iterable[Mapping[str, Any]],
    replicas: Ring | None = None,
    *,
    shift_labels: bool = True,
) -> Tensor:
    """Return the `num_items_in_batch` of each batch of a step: the labels of all batches of all rings, divided by rings.

    With it the mean over all ranks of gradients, summed over micro-batches, is that of one process with all samples, however many
    labels each ring and each batch has (Note [Loss of a shard]):

        replicas = Ring(mesh["dp"])  # once, beside ring = Ring(mesh["cp"])
        count = labels_per_ring(batches, replicas)
        for batch in batches:
            model(**shard_batch({**batch, "num_items_in_batch": count}, ring)).loss.backward()

    Args:
        batches: The whole batches that the ring of this rank has in the step.
        replicas: A Ring over the data parallel dim: one rank of each ring, this one among them. None: there is one ring.
        shift_labels: As for `shard_batch`: with True the first label of a row is predicted by nothing.

    Returns:
        A scalar, fp64, on the device of the labels; at least 1 / rings.

    Example:
        >>> labels_per_ring([{"labels": torch.tensor([[5, 6, -100, 7]])}, {"labels": torch.tensor([[-100, 8]])}]).item()
        3.0
    """
    counts = [
        (batch["labels"][:, 1:] if shift_labels else batch["labels"]).ne(IGNORE_INDEX).sum()
        if batch.get("shift_labels") is None
        else batch["shift_labels"].ne(IGNORE_INDEX).sum()
        for batch in batches
    ]
    if not counts:
        raise ValueError("batches must have at least one batch, got none; pass those of a step")
    total = torch.stack(counts).sum()
    if replicas is None:
        return total.clamp(min=1).double()
    return replicas.sum(total).clamp(min=1).double() / replicas.world_size


class RingCollator:
    """Collator that returns this rank's shard of another collator's batch; for the DataLoader of any training loop.

    Attributes:
        ring: As given, as is `collator`.
        options: The other arguments, by name.

    Args:
        collator: Makes whole batches.
        ring: The ranks that share the sequence.
        layout: See `shard_batch`, as for the other arguments.
        shift_labels: See `shard_batch`.
        pooling: See `shard_batch`.
        balance: See `shard_batch`.
        pack: See `shard_batch`.
    """

    def __init__(
        self,
        collator: Callable[..., Mapping[str, Any]],
        ring: Ring,
        layout: str = "zigzag",
        *,
        shift_labels: bool | None = None,
        pooling: bool = False,
        balance: dict[str, Any] | None = None,
        pack: bool = False,
    ) -> None:
        self.ring = ring
        self.collator = collator
        self.options: dict[str, Any] = dict(
            layout=layout, shift_labels=shift_labels, pooling=pooling, balance=balance, pack=pack
        )
        watch_models()  # workers of a DataLoader call shard_batch where the model is not

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        """Return this rank's shard of the batch of these samples."""
        return shard_batch(self.collator(features), self.ring, **self.options)


def _packed_sharding(
    packed: PackedSequence, ring: Ring, n: int, documents: tuple[int, ...] | None, device: torch.device
) -> Sharding:
    """Return the sharding of a placement that fits the batch."""
    if len(packed.shards) != ring.world_size or packed.documents != documents:
        raise ValueError(
            f"packed must place the {n} tokens and the documents of the batch on {ring.world_size} ranks, got {packed.seq_len} "
            f"tokens in {len(packed.documents) - 1} documents on {len(packed.shards)} ranks; place the documents of this batch, "
            "in its order"
        )
    return packed.sharding(ring, device)


def _with_a_row_per_rank(
    batch: Mapping[str, Any], positions: Tensor | None, sharding: Sharding, tokens: Tensor, unfit: list[str]
) -> tuple[Mapping[str, Any], Tensor | None, Sharding]:
    """Return a batch, its positions and its sharding with rows at the end, so that each rank has one, as models need.

    The rows are padding where there is an attention mask, else a document of their own. They have no labels, and `unshard` leaves
    them out. unfit: what keeps the batch from having more rows.
    """
    n, ranks = sharding.seq_len, len(sharding.virtual_shards)
    more, mask = max(0, ranks - n), batch.get("attention_mask")
    if unfit:
        raise ValueError(
            f"a sequence must leave each of {ranks} ranks a row with {' and '.join(unfit)}, got {n} tokens on ranks of "
            f"{sharding.shard_lens} rows; leave such short batches out, or pack them"
        )
    documents = sharding.documents
    if positions is not None:
        last = positions[..., -1:] if documents is None else positions.new_full((*positions.shape[:-1], 1), -1)
        positions = torch.cat([positions, last + torch.arange(1, more + 1, device=positions.device)], -1)
    fills = dict.fromkeys((*_ROWS, "attention_mask"), 0) | dict.fromkeys(("labels", "shift_labels"), IGNORE_INDEX)
    filled: dict[str, Any] = dict(batch)
    for name, value in fills.items():
        if batch.get(name) is not None:
            rows = (0, 0, 0, more) if name == "inputs_embeds" else (0, more)
            filled[name] = torch.nn.functional.pad(batch[name], rows, value=value)
    if more and mask is None:
        documents = (*(documents or (0, n)), n + more)
    ring: Any = sharding.ring
    made = ring.sharding(n + more, "contiguous", documents, device=tokens.device)
    return filled, positions, made.with_padding(more)


def _check_entries(batch: Mapping[str, Any]) -> None:
    if batch.get("input_ids") is None and batch.get("inputs_embeds") is None:
        raise ValueError(
            f"a batch must have input_ids or inputs_embeds, got {sorted(batch)}; pass what the collator made"
        )
    known = {*_ROWS, *_KEPT, *_CUMULATIVE, *_HANDLED, *IMAGE_KEYWORDS}
    unknown = sorted(name for name, entry in batch.items() if name not in known and entry is not None)
    if unknown:
        raise NotImplementedError(
            f"a batch must have entries that ringattn can shard, got {unknown} too; take them out of the batch, or "
            "shard what belongs to tokens with sharding.shard and add it afterwards"
        )
    for name in (*_ROWS, *_CUMULATIVE, "labels", "shift_labels", "position_ids"):
        entry, dims = batch.get(name), {"input_ids": 2, "inputs_embeds": 3}.get(name)
        if entry is None or (isinstance(entry, Tensor) and dims in (None, entry.dim())):
            continue
        wanted = {2: " b n", 3: " b n e", None: ""}[dims]
        found = tuple(entry.shape) if isinstance(entry, Tensor) else type(entry).__name__
        raise ValueError(
            f"{name} must be a tensor{wanted}, got {found}; pass what the collator made, with its batch dimension"
        )
    mask = batch.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise NotImplementedError(
            f"attention_mask must be a tensor, batch x tokens, got {type(mask).__name__}; ringattn makes masks itself"
        )
    check_supported(batch, "batch")


def _check_pooled(batch: Mapping[str, Any], b: int, n: int) -> None:
    labels = batch.get("labels")
    if batch.get("shift_labels") is not None or (
        labels is not None and (len(labels) != b or (tuple(labels.shape) == (b, n) and not labels.is_floating_point()))
    ):
        raise ValueError(
            f"labels must be one per sequence, {b} or {b} x classes, with pooling=True, got "
            f"{'shift_labels' if labels is None else tuple(labels.shape)}; leave pooling out for labels of tokens"
        )


def _documents(batch: Mapping[str, Any], positions: Tensor | None, n: int) -> tuple[int, ...] | None:
    """Return the boundaries of packed documents, which must be read before sharding: afterwards every shard looks packed."""
    mask = batch.get("attention_mask")
    documents = read_cumulative(batch.get("cu_seq_lens_q"), batch.get("cu_seq_lens_k"), n)
    if documents is None and positions is not None and mask is None:
        documents = read_documents(positions)
    elif documents is None and positions is not None and mask is not None:
        inside = mask.to(torch.bool)
        if bool(((positions.diff(dim=-1) != 1) & inside[:, 1:] & inside[:, :-1]).any()):
            raise ValueError(
                "position_ids must go on by one where there is an attention_mask, got some that restart; leave attention_mask "
                "out of packed batches"
            )
    seq_idx = batch.get("seq_idx")
    if seq_idx is not None:
        edges = read_boundaries(seq_idx.diff(dim=-1) != 0) or (0, n)
        if edges != (documents or (0, n)):
            raise ValueError(
                f"seq_idx must change where documents begin, {documents or (0, n)}, got {edges}; leave it out"
            )
    if documents is not None and mask is not None and not bool(mask.all()):
        raise ValueError("packed documents must come without padding, got an attention_mask with some; leave it out")
    return documents


def _labels(batch: Mapping[str, Any], sharding: Sharding, shift: bool, tree: Tree | None) -> dict[str, Tensor]:
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is None and shifted is None:
        return {}
    if shifted is None:
        assert labels is not None, "one of the two is there"
        shifted = labels
        if shift:
            shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if shift and tree is not None:
            shifted[:, [end - 1 for end in tree.starts[1:]]] = IGNORE_INDEX
    mine = sharding.shard(shifted, dim=1)
    part = {"labels": mine, "shift_labels": mine} if shift else {"labels": mine}
    if batch.get("num_items_in_batch") is None:
        count = shifted.ne(IGNORE_INDEX).sum().clamp(min=1).float()
        part["num_items_in_batch"] = count / sharding.world_size
    return part


def _compared_by(ring: Ring, batch: Mapping[str, Any], images: list[str], sharding: Sharding) -> Sharding:
    """Return the sharding with a digest of its batch; raise when ranks have different ones of the first two."""
    named = {name: x for name in (*_COMPARED, *images) if isinstance(x := batch.get(name), Tensor)}
    compared = _compared.get(ring, 0)
    if compared < COMPARED and ring.world_size > 1 and get_worker_info() is None:
        digests = {name: f"{list(x.shape)} {int(digest_bits(x)) % 2**64:016x}" for name, x in named.items()}
        text = ", ".join(f"{name} {digest}" for name, digest in digests.items())
        ring.assert_equal_across_ranks("the tokens and labels of a batch", text, "shard_batch", SAME_SEQUENCE)
        # not before: a rank whose batch was refused did not take part
        _compared[ring] = compared + 1
    return sharding.for_batch(*named.values())
