"""Comparison of calls between the ranks of a ring, through the key-value store of their process group.

A client of torch's TCPStore holds its lock while it waits, so that no other thread could write the keys that other ranks wait
for. So a thread has a client for itself while it compares: the group's, or a clone where that one is taken, which is kept
for the next time. Other stores hold no lock while they wait.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from ringattn.transport.process_group import resolve_group

_CLONES: weakref.WeakKeyDictionary[Any, tuple[threading.Lock, list[Any]]] = weakref.WeakKeyDictionary()
"""By a group's store: a lock of the thread that uses it, and clones that no thread is using."""


@contextlib.contextmanager
def _client(store: Any) -> Iterator[Any]:
    """Yield the store, or a clone while another thread uses it."""
    taken, clones = _CLONES.setdefault(store, (threading.Lock(), []))
    if taken.acquire(blocking=False):
        try:
            yield store
        finally:
            taken.release()
        return
    try:
        clone = clones.pop()
    except IndexError:
        clone = _clone(store)
    try:
        yield clone
    finally:
        if clone is not store:
            clones.append(clone)


def _clone(store: Any) -> Any:
    """Return another client; the store itself where there can be none or none is needed."""
    below = getattr(store, "_underlying_non_prefix_store", store)
    with contextlib.suppress(RuntimeError):  # this process may have all the sockets that it may have
        return store.clone() if isinstance(below, TCPStore) else store
    return store


_DOING = "doing"
"""Key in a record of the call that its rank is in."""
_OFFER = "offer"
"""Key in a record of a value that is not compared."""
_SHOWN = 200
"""Characters of a call that messages show."""
_NOWHERE = "nowhere"
"""Note of a rank that waits for no other rank any more."""
_GAVE_UP = "gave up"
"""In place of the text of a rank whose wait has timed out."""
GIVE_THE_SAME = "give all of them the same"
"""How to correct a difference between ranks, where a caller knows no more."""
_PUBLISHED = "_ringattn_published"
"""Attribute of an error: the names of the consensus objects in which a round has ended in it."""


class RankConsensus:
    """Comparison of the calls of a group's ranks, in numbered rounds, through the group's key-value store.

    The store needs no device, no stream and no matching collective: a rank that fails publishes its error and raises at
    once, and the others find it at their next comparison. Keys are deleted, so that a server can compare for days: once all
    ranks have come to a round, all have read the one before, and each deletes its own keys of it.

    Attributes:
        name: Prefix of the keys: the same on all ranks, different for each ring.
        failures: Rounds so far that ended in an error here: the same number on all ranks that came to the same round.
    """

    def __init__(self, group_name: str, rank: int, world_size: int, name: str, timeout: timedelta) -> None:
        self.failures = 0
        self.group_name = group_name
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.timeout = timeout
        self._round = 0
        self._taken = threading.Lock()  # by the thread that is in the current round
        self._left: list[str] = []  # keys that others may still read

    def publish(self, text: str) -> None:
        """Write this rank's text for the current round, and go on to the next."""
        with _client(self._store()) as store:
            self._set(store, text)
        self._round += 1

    def compare(self, text: str, doing: str = "a comparison") -> list[str]:
        """Write this rank's text and return those of all ranks; RuntimeError names ranks that did not come within the timeout."""
        with self._taken, _client(self._store()) as store:
            return self._compare(store, text, doing)

    def _compare(self, store: Any, text: str, doing: str) -> list[str]:
        keys = [self._key(peer) for peer in range(self.world_size)]
        read = self._left.copy()
        self._left.clear()
        # read by ranks that wait for this one in another ring
        note = self._note(self.rank)
        self._set(store, text, **{note: f"{doing} of ring {self.name!r}"})
        try:
            store.wait(keys, self.timeout)
        except RuntimeError as error:
            # a host that is busy may find the timeout over and all ranks there
            if missing := [peer for peer, key in enumerate(keys) if not store.check([key])]:
                self._left += read
                self._give_up(store, missing, doing, error)
        self._round += 1
        store.set(note, _NOWHERE)
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        for key in read:
            store.delete_key(key)
        texts = [text.decode() for text in found]
        gone = [peer for peer, text in enumerate(texts) if text == _GAVE_UP]
        if gone:
            raise RuntimeError(
                f"ring rank {self.rank}: ring ranks {gone} waited {self.timeout} for this attention call and gave it up; all "
                "ranks must come to it within the timeout of the Ring, which may be longer"
            )
        return texts

    def _give_up(self, store: Any, missing: Sequence[int], doing: str, error: RuntimeError) -> NoReturn:
        # ranks that come later must neither go on alone nor be a round behind
        store.set(self._key(self.rank), _GAVE_UP)
        self._round += 1
        found = {peer: self._note(peer) for peer in missing}
        notes = {peer: store.get(key).decode() for peer, key in found.items() if store.check([key])}
        notes = {peer: note for peer, note in notes.items() if note != _NOWHERE}
        where = f"this rank is in {doing}"
        if notes:
            here = f"{where} of ring {self.name!r}"
            where = ", ".join([here, *(f"ring rank {peer} in {note}" for peer, note in notes.items())])
        raise RuntimeError(
            f"ring rank {self.rank}: ring ranks {missing} did not make this attention call within {self.timeout} ({where}); "
            f"all ranks of a ring must make the same calls in the same order"
        ) from error

    @contextlib.contextmanager
    def publishing_errors(self) -> Iterator[None]:
        """Publish an exception raised inside, and raise it."""
        try:
            yield
        except Exception as error:
            self.publish_error(error)
            raise

    def publish_error(self, error: Exception) -> None:
        """Publish an error of this rank in place of its text for the current round, and go on to the next.

        An error uses up one round, however many places it passes on its way: an error that a comparison raised has had its
        round, and so has an error that was raised from a published one.
        """
        # while another thread compares, there is no round for it
        if not self._taken.acquire(blocking=False):
            return
        try:
            # without the group, as in a forked process, there are no other ranks
            if self._is_new(error):
                with contextlib.suppress(RuntimeError):
                    self.publish(json.dumps({"refused": f"{type(error).__name__}: {error}"}))
        finally:
            self._taken.release()

    def raise_on_all_ranks(self, error: Exception) -> NoReturn:
        """Publish an error (`publish_error`) and raise it."""
        self.publish_error(error)
        raise error

    def compare_calls(self, record: dict[str, Any], doing: str, offer: Any = None) -> Any:
        """Raise ValueError on every rank unless the JSON records of all ranks' calls are equal.

        Args:
            record: Facts of the call.
            doing: The call in words.
            offer: JSON value that may differ between ranks.

        Returns:
            The first offer, in rank order, that is not None; else None.
        """
        with self.counting_failures():
            record = {**record, _DOING: doing, _OFFER: offer}
            records = [json.loads(found) for found in self.compare(json.dumps(record), doing)]
            offers = [found.pop(_OFFER, None) for found in records]
            raise_differences(records)
        return next((found for found in offers if found is not None), None)

    def share(self, what: str, value: Any, doing: str = "") -> list[Any]:
        """Return the JSON values of all ranks, in rank order; ValueError if another rank's call failed or shares another value."""
        with self.counting_failures():
            doing = (doing or what)[:_SHOWN]
            texts = self.compare(json.dumps({what: value, _DOING: doing}), doing)
            records = [json.loads(text) for text in texts]
            if any(what not in record for record in records):
                raise_differences(records)
        return [record[what] for record in records]

    def assert_equal_across_ranks(self, what: str, text: str, doing: str = "", fix: str = GIVE_THE_SAME) -> None:
        """Raise ValueError on every rank, naming those that differ from most, unless a text is equal on all ranks."""
        with self.counting_failures():
            found = self.share(what, text, doing or f"{what}: {text}")
            usual = Counter(found).most_common(1)[0][0]
            differing = [rank for rank, other in enumerate(found) if other != usual]
            if differing:
                raise ValueError(
                    f"{what} must be the same on all ranks of a ring, got {usual} on most ranks and {found[differing[0]]} on ring "
                    f"rank {differing[0]} (ring ranks {differing} differ); {fix}"
                )

    def first(self, what: str, value: Any) -> Any:
        """Return the first value of all ranks, in rank order, that is not None; else None."""
        return next((found for found in self.share(what, value) if found is not None), None)

    @contextlib.contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count the round if it ends in an error, which all ranks then have."""
        try:
            yield
        except Exception as error:
            self._is_new(error)
            raise

    def _is_new(self, error: Exception) -> bool:
        """Return whether no round has ended yet in this error or in the one that it was raised from, and count it then."""
        known = any(self.name in vars(one).get(_PUBLISHED, ()) for one in (error, error.__cause__) if one is not None)
        vars(error).setdefault(_PUBLISHED, set()).add(self.name)
        self.failures += not known
        return not known

    def _set(self, store: Any, text: str, **others: str) -> None:
        """Write this rank's text for the current round, and other keys."""
        key = self._key(self.rank)
        texts = {**others, key: text}
        if store.has_extended_api():
            store.multi_set(list(texts), list(texts.values()))
        else:
            for other, value in texts.items():
                store.set(other, value)
        self._left.append(key)

    def _note(self, peer: int) -> str:
        """Return the key of a rank's note while it waits, in any ring."""
        return f"ringattn/waits/{self.world_size}/{peer}"

    def _key(self, peer: int) -> str:
        return f"ringattn/{self.name}/{self._round}/{peer}"

    def _store(self) -> Any:
        group = resolve_group(self.group_name)
        return distributed_c10d._get_process_group_store(group)


def raise_calls(calls: Sequence[str], at: str = "") -> NoReturn:
    """Raise ValueError because ranks are in different calls, given by rank; `at` says which of their calls."""
    ranks = defaultdict[str, list[int]](list)
    for rank, call in enumerate(calls):
        ranks[call].append(rank)
    listed = " and ".join(f"{call} on ring ranks {those}" for call, those in ranks.items())
    raise ValueError(
        f"all ranks must make the same calls in the same order, got {listed}{at and f' as {at}'}; look for a branch that not all "
        "ranks take"
    )


def raise_differences(records: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError, naming the ranks and the differences, if records of calls differ or one has an error."""
    refused = {rank: record["refused"] for rank, record in enumerate(records) if "refused" in record}
    if refused:
        listed = "; ".join(f"ring rank {rank} refused: {text}" for rank, text in refused.items())
        raise ValueError(f"{listed}; every rank of the ring refuses with it")
    calls = [record.pop(_DOING, "a comparison") for record in records]
    if len({call.partition("(")[0] for call in calls}) > 1:
        raise_calls(calls)
    common = Counter(json.dumps(record) for record in records).most_common(1)[0][0]
    differing = [rank for rank, record in enumerate(records) if json.dumps(record) != common]
    if not differing:
        return
    usual, odd = json.loads(common), records[differing[0]]
    parts = [
        f"{key}: {usual.get(key)} on most ranks, {odd.get(key)} on ring rank {differing[0]}"
        for key in {**usual, **odd}
        # as texts, in which 3 is not 3.0
        if json.dumps(usual.get(key)) != json.dumps(odd.get(key))
    ]
    raise ValueError(
        f"all ranks must make the same call, got a different one on ring ranks {differing} ({'; '.join(parts)}); "
        f"pass the same options, dtypes and head counts everywhere"
    )
