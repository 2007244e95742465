"""Comparison of calls between the ranks of a ring, through the key-value store of their process group.

Owns the rounds in which ranks compare texts, the errors that ranks publish there, and the messages that name the ranks that
differ. Refuses to know what a call computes.

Note [Who waits for the store]
    A client of torch's TCPStore keeps its lock while it waits: where one thread waits for other ranks, no other thread can
    leave there what these wait for. So a thread has a client for itself while it compares: the group's, or a clone where that
    one is taken, which is kept for the next time. Other stores hold no lock while they wait.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

from torch.distributed import TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from ringattn.transport.process_group import resolve_group

_CLONES: weakref.WeakKeyDictionary[Any, tuple[threading.Lock, list[Any]]] = weakref.WeakKeyDictionary()
"""By a group's store: held by the thread that waits for the store itself, and clones that no thread is using."""


@contextlib.contextmanager
def _client(store: Any) -> Iterator[Any]:
    """The store, or a clone where another thread waits for it (Note [Who waits for the store])."""
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
    """Another client, or the store itself where there can be none or none is needed."""
    below = getattr(store, "_underlying_non_prefix_store", store)
    with contextlib.suppress(RuntimeError):  # this process may have all the sockets that it may have
        return store.clone() if isinstance(below, TCPStore) else store
    return store


_DOING = "doing"
"""Under which key a record says which call its rank is in."""
_SHOWN = 200
"""Characters of a call that messages show."""
_NOWHERE = "nowhere"
"""What a rank notes when it waits for no other rank any more."""

_GAVE_UP = "gave up"
"""What a rank leaves in place of its text when others did not come in time."""


_HEARD = "_ringattn_heard"
"""Under which name an error keeps the names of the agreements in which a round has ended in it."""


_GONE: defaultdict[str, deque[tuple[str, int, int, list[str]]]] = defaultdict(deque)
"""By group: name, rank and world size of agreements that are gone, and the keys that they left."""


def _take_back(store: Any, gone: deque[tuple[str, int, int, list[str]]]) -> None:
    """Says that agreements are gone, and takes back what was left of those that are gone on all ranks."""
    while gone:
        try:
            name, rank, size, left = gone.popleft()
        except IndexError:  # another thread
            return
        count = f"ringattn/{name}/gone"
        store.set(f"{count}/{rank}", json.dumps(left))
        if store.add(count, 1) == size:
            said = [f"{count}/{peer}" for peer in range(size)]
            keys = [key for one in said for key in json.loads(store.get(one))]
            for key in (*keys, *said, count):
                store.delete_key(key)


class RankConsensus:
    """Lets the ranks of a group compare what they are about to do, through the group's key-value store.

    The store needs no device, no stream and no matching collective: a rank that refuses leaves its reason and raises
    at once, and the others find it when they come to compare. A server compares for days, so nothing may stay: once all have
    come to a round, all have read the one before, and each takes back what it left there. What a rank left last it can not take
    back by itself when its agreement is gone: that says so in the next comparison of any other (the store is there then), and
    the last rank that says it takes back what all of them left.

    Args:
        group_name: Name of the process group.
        rank: This rank within the group.
        world_size: Ranks in the group.
        name: Prefix of the keys: the same on all ranks, different for each ring.
        timeout: How long to wait for the others.

    Attributes:
        failures: Rounds so far that ended in an error here: the same number on all ranks that came to the same round.
    """

    def __init__(self, group_name: str, rank: int, world_size: int, name: str, timeout: timedelta) -> None:
        self.failures = 0
        self._group_name = group_name
        self._rank = rank
        self._world_size = world_size
        self._name = name
        self._timeout = timeout
        self._round = 0
        self._taken = threading.Lock()  # by the thread that is in the current round
        self._left: list[str] = []  # keys that others may still read
        gone = _GONE[group_name]
        weakref.finalize(self, gone.append, (name, rank, world_size, self._left)).atexit = False

    def publish(self, text: str) -> None:
        """Leaves this rank's text for the current round and goes on to the next."""
        with _client(self._store()) as store:
            self._set(store, text)
        self._round += 1

    def compare(self, text: str, doing: str = "a comparison") -> list[str]:
        """Leaves this rank's text and returns the texts of all ranks, in rank order.

        Args:
            text: This rank's.
            doing: The call that this rank is in, for messages.

        Raises:
            RuntimeError: Some ranks did not come within the timeout, or have not waited for this one; they are named.
        """
        with self._taken, _client(self._store()) as store:
            return self._compare(store, text, doing)

    def _compare(self, store: Any, text: str, doing: str) -> list[str]:
        keys = [self._key(peer) for peer in range(self._world_size)]
        read = self._left.copy()
        self._left.clear()
        # ranks that miss this one in another ring read what it waits in
        note = self._note(self._rank)
        self._set(store, text, **{note: f"{doing} of ring {self._name!r}"})
        try:
            store.wait(keys, self._timeout)
        except RuntimeError as error:
            self._left += read
            missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
            # who comes later is not to go on alone, nor to be a round behind
            store.set(self._key(self._rank), _GAVE_UP)
            self._round += 1
            found = {peer: self._note(peer) for peer in missing}
            notes = {peer: store.get(key).decode() for peer, key in found.items() if store.check([key])}
            notes = {peer: note for peer, note in notes.items() if note != _NOWHERE}
            where = f"this rank is in {doing}"
            if notes:
                here = f"{where} of ring {self._name!r}"
                where = ", ".join([here, *(f"ring rank {peer} in {note}" for peer, note in notes.items())])
            raise RuntimeError(
                f"ring rank {self._rank}: ring ranks {missing} did not make this attention call within {self._timeout} ({where}); "
                f"all ranks of a ring must make the same calls in the same order"
            ) from error
        self._round += 1
        store.set(note, _NOWHERE)
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        for key in read:
            store.delete_key(key)
        _take_back(store, _GONE[self._group_name])
        texts = [text.decode() for text in found]
        gone = [peer for peer, text in enumerate(texts) if text == _GAVE_UP]
        if gone:
            raise RuntimeError(
                f"ring rank {self._rank}: ring ranks {gone} waited {self._timeout} for this attention call and gave it up; all "
                "ranks must come to it within the timeout of the Ring, which may be longer"
            )
        return texts

    def __enter__(self) -> None:
        """Nothing: what is raised inside is looked at."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tells the others of an error."""
        if isinstance(error, Exception):
            self.publish_error(error)

    def publish_error(self, error: Exception) -> None:
        """Leaves an error of this rank for the current round, where ranks find it that come to compare, and goes on to the next.

        An error uses up one round, however many places it passes on its way: what a comparison raised has had its round, and so
        has what was raised from an error that was told.

        Args:
            error: What is being raised.
        """
        # beside a thread that compares there is no round to leave it in
        if not self._taken.acquire(blocking=False):
            return
        try:
            # without the group, as in a process forked from its own, there is nobody to tell
            if self._is_new(error):
                with contextlib.suppress(RuntimeError):
                    self.publish(json.dumps({"refused": f"{type(error).__name__}: {error}"}))
        finally:
            self._taken.release()

    def raise_on_all_ranks(self, error: Exception) -> NoReturn:
        """Raises an error of this rank that ranks which compare their next call find there (`publish_error`).

        Raises:
            Exception: The error.
        """
        self.publish_error(error)
        raise error

    def compare_calls(self, record: dict[str, Any], doing: str) -> None:
        """Compares what ranks say of their calls.

        Args:
            record: As JSON has it.
            doing: The call in words: its name, and in parentheses what it is given.

        Raises:
            ValueError: They differ, or another rank has refused its call; raised on every rank.
            RuntimeError: As `compare`.
        """
        with self._failing():
            record = {**record, _DOING: doing}
            raise_differences([json.loads(found) for found in self.compare(json.dumps(record), doing)])

    def share(self, what: str, value: Any, doing: str = "") -> list[Any]:
        """The values of all ranks, in rank order.

        Args:
            what: What it is.
            value: This rank's, as JSON has it.
            doing: The call that this rank is in; default what.

        Raises:
            ValueError: Another rank has refused its call, or says something else.
            RuntimeError: As `compare`.
        """
        with self._failing():
            doing = (doing or what)[:_SHOWN]
            texts = self.compare(json.dumps({what: value, _DOING: doing}), doing)
            records = [json.loads(text) for text in texts]
            if any(what not in record for record in records):
                raise_differences(records)
        return [record[what] for record in records]

    def assert_equal_across_ranks(self, what: str, text: str, doing: str = "") -> None:
        """Compares a text that must be the same on all ranks.

        Args:
            what: What the text says, in words for the message.
            text: Must be equal on all ranks.
            doing: The call that this rank is in; default what and the text.

        Raises:
            ValueError: It is not; raised on every rank, naming those that differ from most.
        """
        with self._failing():
            found = self.share(what, text, doing or f"{what}: {text}")
            usual = Counter(found).most_common(1)[0][0]
            differing = [rank for rank, other in enumerate(found) if other != usual]
            if differing:
                raise ValueError(
                    f"{what} must be the same on all ranks of a ring, got {usual} on most ranks and {found[differing[0]]} on ring "
                    f"rank {differing[0]} (ring ranks {differing} differ); give all of them the same"
                )

    def differ(self, call: str, at: str) -> NoReturn:
        """Raises on all ranks, which know that their calls differ.

        Args:
            call: That of this rank.
            at: Which of its calls.

        Raises:
            ValueError: Naming the calls and the ranks.
        """
        with self._failing():
            raise_calls(self.share("this call", call), at)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Counts the round if it ends in an error, of which all ranks know then."""
        try:
            yield
        except Exception as error:
            self._is_new(error)
            raise

    def _is_new(self, error: Exception) -> bool:
        """Whether no round has ended in an error yet, nor in the one that it was raised from; counts it then."""
        known = any(self._name in vars(one).get(_HEARD, ()) for one in (error, error.__cause__) if one is not None)
        vars(error).setdefault(_HEARD, set()).add(self._name)
        self.failures += not known
        return not known

    def _set(self, store: Any, text: str, **others: str) -> None:
        """Leaves this rank's text for the current round, and other keys."""
        key = self._key(self._rank)
        texts = {**others, key: text}
        if store.has_extended_api():
            store.multi_set(list(texts), list(texts.values()))
        else:
            for other, value in texts.items():
                store.set(other, value)
        self._left.append(key)

    def _note(self, peer: int) -> str:
        """The key of what a rank notes while it waits, whichever ring it waits in."""
        return f"ringattn/waits/{self._world_size}/{peer}"

    def _key(self, peer: int) -> str:
        return f"ringattn/{self._name}/{self._round}/{peer}"

    def _store(self) -> Any:
        group = resolve_group(self._group_name)
        return distributed_c10d._get_process_group_store(group)


def raise_calls(calls: Sequence[str], at: str = "") -> NoReturn:
    """Raises because ranks are in different calls.

    Args:
        calls: The call that each rank is in, by rank.
        at: Which of their calls.

    Raises:
        ValueError: Naming the calls and the ranks.
    """
    ranks = defaultdict[str, list[int]](list)
    for rank, call in enumerate(calls):
        ranks[call].append(rank)
    listed = " and ".join(f"{call} on ring ranks {those}" for call, those in ranks.items())
    raise ValueError(
        f"all ranks must make the same calls in the same order, got {listed}{at and f' as {at}'}; look for a branch that not all "
        "ranks take"
    )


def raise_differences(records: Sequence[dict[str, Any]]) -> None:
    """Raises if what the ranks are about to do differs, or if one has refused.

    Args:
        records: What each rank has said of its call, by rank.

    Raises:
        ValueError: Naming the ranks, and what differs.
    """
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
