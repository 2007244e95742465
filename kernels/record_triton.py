"""Calls of launchers that are worked out once and then played back.

Owns the records of calls: which launches a call comes down to, and where the addresses of its tensors go in them. Refuses to
know what kernels compute, and how a launch reaches the driver (Note [Bound launch] in launch_triton.py).

Note [Record]
    What a launcher works out (checks, configurations, plans, strides, constants) follows from facts: the identity of sides,
    the shape, strides, dtype and alignment of every tensor, and the value of everything else that it is given. All of these
    are the key of a record, because the key is made from the arguments of the call and not chosen by the launcher. A first
    call runs the launcher, which says on a tape what it launches, which rooms it needs and which functions of torch it
    calls; a later call with the same key plays the tape: its launches are flat lists with holes for addresses.
    What lives as long as the record must be said to: a tensor in a launch is an argument of the call, made on the tape, or
    kept. Objects compared by identity (sides) are held weakly, and records die with them; their tensors are kept.
    A call that is given one tensor twice is not recorded: the tape could not tell which of the two a hole is for.

Note [Reel]
    Making a key costs more than playing a tape: it looks at every tensor of every launcher. Who calls a few launchers again and
    again says once which tensors change from call to call, and which never do: `replay` runs what it is given and listens which
    tapes that plays, and splices them to a reel, a list of launches with holes for what changes alone. A reel is found by the
    facts about these tensors, by the identity of the others, and by whatever else the caller names; sides are held weakly, as by
    records. A tensor that nobody has named, a call that cannot be played, or one that no tape holds: there is no reel.

Note [Leased]
    Who captures launches into a graph repeats them later with the same addresses, asking nobody here. So rooms must stay, and
    what launches read: both are then of the lease that was given (`leased`), which also says whether launches made a tensor that
    would be gone by then, or went a way of which nothing is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor
from triton.runtime import driver

from ringattn.kernels import launch_triton
from ringattn.kernels.contract import Lease, Reels
from ringattn.kernels.launch_triton import Bound, Template

CAPACITY = 1024
"""Records of one launcher; beyond it all are forgotten, and made again as calls come."""
ALIGNMENT = 32
"""Bytes: the widest store of a thread. Where an address stands between its multiples is a fact."""

REELS = 16
"""Reels of one table; beyond it all are forgotten, likewise."""

_ROOM = 512  # bytes: rooms are aligned as the caching allocator aligns
_STREAM = 3  # its place behind a grid
_ENCODED = 64  # descriptors that a hole remembers

P = ParamSpec("P")

_HERE = contextlib.nullcontext()

_records: list[dict[Hashable, Tape]] = []


class _Ear(threading.local):
    """Who listens in a thread.

    Attributes:
        heard: Tapes and the tensors they were played with; None for a call without a tape. None: nobody listens.
        lease: Note [Leased]; None: nobody will repeat what is launched.
    """

    heard: list[tuple[Tape, list[Any]] | None] | None = None
    lease: Lease | None = None


_ear = _Ear()


def recorded(launcher: Callable[Concatenate[Tape, P], None]) -> Callable[P, None]:
    """Runs a launcher at the first call of a kind, and plays back what it did at the others (Note [Record]).

    Args:
        launcher: Launches through the tape that it is given, and touches the device in no other way. Its other arguments
            are tensors, dataclasses and tuples of these, and hashable values; tensors are all on the device of the first.
    """
    records: dict[Hashable, Tape] = {}
    _records.append(records)

    @functools.wraps(launcher)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        call = _Call()
        call.look(args)
        if kwargs:
            call.facts.append(tuple(kwargs))
            call.look(kwargs.values())
        index = call.tensors[0].get_device()
        call.facts.append(index)
        key = tuple(call.facts)
        tape, heard = records.get(key), _ear.heard
        given = call.tensors if heard is None else list(call.tensors)
        with _on(index):
            if tape is not None:
                tape.play(call)
                if heard is not None:
                    heard.append((tape, given))
                return
            tape = Tape(call)
            launcher(tape, *args, **kwargs)
        known = tape.close()
        if _ear.lease is not None:
            _ear.lease.held.append(tape)
            _ear.lease.whole &= known and not tape.is_public
        if known:
            if len(records) >= CAPACITY:
                records.clear()
            records[key] = tape
            tape.held = [weakref.ref(x, lambda _: records.pop(key, None)) for x in call.held]
        if heard is not None:
            heard.append((tape, given) if known else None)

    return run


def replay(
    reels: Reels,
    key: tuple[Hashable, ...],
    run: Callable[[], object],
    *,
    given: tuple[Tensor, ...],
    made: tuple[Tensor, ...] = (),
    kept: tuple[Tensor, ...] = (),
    held: tuple[Any, ...] = (),
) -> None:
    """Runs calls of launchers, or plays back what they came down to (Note [Reel]).

    Args:
        reels: Of these calls; kept by the caller, for as long as it likes.
        key: All that decides what is run beside the tensors and what is held.
        run: Calls launchers, and touches the device in no other way.
        given: Tensors that change from call to call, on one device.
        made: Likewise, but of shapes, strides and dtypes that follow from the others; as aligned as the caching allocator's.
        kept: Tensors that are the same at every call with such a key.
        held: Objects that launchers compare by identity. The reel goes with them.
    """
    facts: list[Hashable] = [*key, *map(id, kept), *map(id, held)]
    for x in given:
        facts += (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT)
    key = tuple(facts)
    reel = reels.get(key)
    if reel is not None:
        reel.play(given + made)
        return
    before, heard = _ear.heard, []
    _ear.heard = heard
    try:
        run()
    finally:
        _ear.heard = before
    if before is not None:
        before += heard
    reel = _splice(heard, given + made, kept)
    if reel is not None:
        if len(reels) >= REELS:
            reels.clear()
        reels[key] = reel
        reel.kept = kept
        there = weakref.ref(reels)  # in a circle with its reels their memory would wait for a collection
        reel.held = [weakref.ref(x, lambda _: _forget(there(), key)) for x in held]


@contextlib.contextmanager
def leased(lease: Lease) -> Iterator[None]:
    """Takes what launches need of a lease, in this thread (Note [Leased]).

    Args:
        lease: Which.
    """
    before, _ear.lease = _ear.lease, lease
    try:
        yield
    finally:
        _ear.lease = before


def is_heard() -> bool:
    """Whether somebody wants to hear of each launch."""
    return launch_triton.is_hooked()


def _forget(reels: Reels | None, key: Hashable) -> None:
    if reels is not None:
        reels.pop(key, None)


def forget() -> None:
    """Forgets all records: those of calls that would now come down to something else."""
    for records in _records:
        records.clear()


class _Call:
    """What a call is given, taken apart.

    Attributes:
        facts: All that decides what it comes down to.
        tensors: Its tensors, in order.
        addresses: Theirs.
        held: Its objects that are compared by identity.
    """

    __slots__ = ("addresses", "facts", "held", "tensors")

    def __init__(self) -> None:
        self.facts: list[Hashable] = []
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []
        self.held: list[Any] = []

    def look(self, values: Iterable[Any]) -> None:
        """Adds values."""
        facts, tensors, addresses = self.facts, self.tensors, self.addresses
        for x in values:
            kind = type(x)
            way = _WAYS.get(kind) or _find_way(kind)
            if way is _TENSOR:
                address = x.data_ptr()
                facts += (x.shape, x.stride(), x.dtype, address % ALIGNMENT)
                tensors.append(x)
                addresses.append(address)
            elif way is _VALUE:
                facts.append(x)
            elif way is _IDENTITY:
                facts.append(id(x))
                self.held.append(x)
            else:
                facts.append(kind)
                self.look(way(x))
                facts.append(kind)


_VALUE, _TENSOR, _IDENTITY = "value", "tensor", "identity"
_WAYS: dict[type, Any] = {tuple: iter, list: iter}
"""How an argument of a type is taken apart: one of these words, or what gives its parts."""


def _find_way(kind: type) -> Any:
    if issubclass(kind, Tensor):
        way: Any = _TENSOR
    elif not dataclasses.is_dataclass(kind):
        way = _VALUE
    elif kind.__eq__ is object.__eq__:
        way = _IDENTITY
    else:
        names = [one.name for one in dataclasses.fields(kind)]
        # of fewer names it makes no tuple
        way = operator.attrgetter(*names) if len(names) > 1 else lambda x: [getattr(x, name) for name in names]
    _WAYS[kind] = way
    return way


class Tape:
    """What a call comes down to: launches, rooms and calls of torch, in order.

    Attributes:
        held: References to the objects on which the record depends.
        is_public: Some launch goes by way of Triton's own.
    """

    def __init__(self, call: _Call) -> None:
        self.held: list[Any] = []
        self._tensors = list(call.tensors)
        self._places = {id(x): i for i, x in enumerate(call.tensors)}
        self._distinct = len(self._places) == len(call.tensors)
        self._index, self._device = call.tensors[0].get_device(), call.tensors[0].device
        self._kept: dict[int, Tensor] = {}
        self._steps: list[_Launch | _Make] = []
        self._rooms: list[tuple[int, int, Callable[[], Tensor]]] = []
        self._room_bytes = 0
        self.is_public = False
        self._count = 0
        self.keep(*call.held)

    def keep(self, *owners: Any) -> None:
        """Lets launches be given the tensors of these dataclasses, which the record then keeps."""
        for owner in owners:
            for x in owner if isinstance(owner, tuple) else vars(owner).values():
                if isinstance(x, Tensor):
                    self._kept[id(x)] = x
                elif dataclasses.is_dataclass(x) or (isinstance(x, tuple) and x and dataclasses.is_dataclass(x[0])):
                    self.keep(x)

    def room(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for what one launch leaves to another; only for launches."""
        make = functools.partial(torch.empty, shape, dtype=dtype, device=self._device)
        room, lease = make(), _ear.lease
        if lease is not None:
            lease.held.append(room)
        self._rooms.append((self._add(room), self._room_bytes, make))
        self._room_bytes += -(-math.prod(shape) * room.element_size() // _ROOM) * _ROOM
        return room

    def call(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """The result of a function of tensors, called at every playback; it must not hold tensors itself."""
        result = function(*tensors)
        if _ear.lease is not None:
            _ear.lease.whole &= any(result is x for x in tensors)
        sources = tuple(self._places[id(x)] for x in tensors)
        place = self._places.get(id(result))
        self._steps.append(_Make(function, sources, self._add(result) if place is None else place))
        return result

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], **options: int
    ) -> None:
        """As `launch_triton.launch`."""
        bound = launch_triton.launch(kernel, grid, args, constants, **options)
        step = _Launch(kernel, grid, [self._without(x) for x in args], constants, options, bound)
        for at, x in enumerate(args):
            template = getattr(x, "template", None)
            if template is not None or isinstance(x, Tensor | tuple):
                place = self._place_of(x if template is None else getattr(x, "base"))  # noqa: B009
                if place is not None:
                    step.holes.append((at, place, template))
        self.is_public |= bound is None or bound.run is None
        self._steps.append(step)

    def close(self) -> bool:
        """Ends the recording; says whether the tape can be played."""
        self._count = len(self._tensors)
        if not self.is_public:
            for step in self._steps:
                if isinstance(step, _Launch):
                    step.flatten(self._tensors)
        self._tensors.clear()
        self._places.clear()
        return self._distinct

    def forgo(self) -> None:
        """Says that this call does what a tape does not hold."""
        self._distinct = False

    def play(self, call: _Call) -> None:
        """Does the same with the tensors of another call."""
        if self.is_public or launch_triton.is_hooked():
            self.play_publicly(call.tensors)
            return
        tensors: list[Any] = call.tensors
        addresses = call.addresses
        missing = self._count - len(tensors)
        tensors += (None,) * missing
        addresses += (0,) * missing
        room = None
        if self._rooms:
            room = _make_room(self._room_bytes, self._device)
            base = room.data_ptr()
            for place, offset, _ in self._rooms:
                addresses[place] = base + offset
        if _ear.lease is not None:
            _lease_to(_ear.lease, self, self._steps)
        active: Any = driver.active  # its declared class does not say that devices have streams
        stream = active.get_current_stream(self._index)
        for step in self._steps:
            step.play(stream, tensors, addresses)

    def play_publicly(self, tensors: list[Any]) -> None:
        """Likewise, by way of Triton's own launches; more is added to the tensors."""
        if _ear.lease is not None:
            _ear.lease.whole = False
        tensors += (None,) * (self._count - len(tensors))
        for place, _, make in self._rooms:
            tensors[place] = make()
        for step in self._steps:
            step.play_publicly(tensors)

    def _add(self, x: Tensor) -> int:
        assert x.data_ptr() % ALIGNMENT == 0, "what is made for a call is aligned at every playback"
        self._tensors.append(x)
        self._places[id(x)] = len(self._tensors) - 1
        return len(self._tensors) - 1

    def _place_of(self, x: Any) -> Any:
        """The place of a tensor, or of those of a tuple, among those of a call; None: it is kept."""
        if isinstance(x, tuple):
            return tuple(self._places[id(part)] for part in x)
        place = self._places.get(id(x))
        assert place is not None or id(x) in self._kept, "a tensor of a launch belongs to the call or is kept"
        return place

    def _without(self, x: Any) -> Any:
        """An argument as the tape holds it: nothing in place of what a call brings."""
        if isinstance(x, tuple) or hasattr(x, "template"):
            return None
        return None if isinstance(x, Tensor) and id(x) in self._places else x


class Reel:
    """Several tapes in a row, of which only some tensors change (Note [Reel]).

    Args:
        parts: The tapes, and per tensor of the call that each was played with its place among those that change, or itself.
        changing: How many tensors change.

    Attributes:
        held: References to the objects on which it depends.
        kept: The tensors that do not change.
    """

    def __init__(self, parts: Sequence[tuple[Tape, list[int | Tensor]]], changing: int) -> None:
        self.held: list[Any] = []
        self.kept: tuple[Tensor, ...] = ()
        self._parts = parts  # keeps what launches read
        self._index, self._device = parts[0][0]._index, parts[0][0]._device
        self._is_public = any(tape.is_public for tape, _ in parts)
        self._steps: list[_Launch | _Make] = []
        self._rest: list[Any] = []  # the tensors that do not change, and places of what is made
        self._addresses: list[int] = []  # theirs
        self._rooms: list[tuple[int, int]] = []
        self._room_bytes = 0
        if not self._is_public:
            for tape, tensors in parts:
                self._append(tape, tensors, changing)
        self._makes = any(isinstance(step, _Make) for step in self._steps)

    def play(self, changing: tuple[Tensor, ...]) -> None:
        """Does what was heard, with these tensors.

        Args:
            changing: In the order of those that were named.
        """
        with _on(self._index):
            if self._is_public or launch_triton.is_hooked():
                for tape, tensors in self._parts:
                    tape.play_publicly([changing[x] if isinstance(x, int) else x for x in tensors])
                return
            addresses = [x.data_ptr() for x in changing]
            addresses += self._addresses
            room = None
            if self._rooms:
                room = _make_room(self._room_bytes, self._device)
                base = room.data_ptr()
                for place, offset in self._rooms:
                    addresses[place] = base + offset
            if _ear.lease is not None:
                _lease_to(_ear.lease, self, self._steps)
            tensors = [*changing, *self._rest] if self._makes else []
            active: Any = driver.active  # as in `Tape.play`
            stream = active.get_current_stream(self._index)
            for step in self._steps:
                step.play(stream, tensors, addresses)

    def _append(self, tape: Tape, tensors: list[int | Tensor], changing: int) -> None:
        places, known = list[int](), dict[int, int]()
        for x in tensors:
            if isinstance(x, int):
                places.append(x)
                continue
            places.append(changing + len(self._rest))
            known[places[-1]] = x.data_ptr()
            self._rest.append(x)
            self._addresses.append(x.data_ptr())
        more = tape._count - len(tensors)
        places += range(changing + len(self._rest), changing + len(self._rest) + more)
        self._rest += (None,) * more
        self._addresses += (0,) * more
        self._rooms += [(places[place], self._room_bytes + offset) for place, offset, _ in tape._rooms]
        self._room_bytes += tape._room_bytes
        self._steps += [step.moved(places, known) for step in tape._steps]


def _splice(
    heard: Sequence[tuple[Tape, list[Any]] | None], changing: tuple[Tensor, ...], kept: tuple[Tensor, ...]
) -> Reel | None:
    """What was heard as a reel; None: it cannot be one."""
    places: dict[int, int | Tensor] = {id(x): x for x in kept}
    places |= {id(x): i for i, x in enumerate(changing)}
    parts = list[tuple[Tape, list[int | Tensor]]]()
    for one in heard:
        if one is None or any(id(x) not in places for x in one[1]):
            return None
        parts.append((one[0], [places[id(x)] for x in one[1]]))
    distinct = len(places) == len(kept) + len(changing) and len({tape._index for tape, _ in parts}) == 1
    return Reel(parts, len(changing)) if distinct else None


@dataclass(eq=False)
class _Make:
    """A function of some tensors, whose result becomes one more."""

    function: Callable[..., Tensor]
    sources: tuple[int, ...]
    place: int

    def moved(self, places: Sequence[int], known: Mapping[int, int]) -> _Make:
        """The same with its tensors at other places."""
        del known
        return _Make(self.function, tuple(places[i] for i in self.sources), places[self.place])

    def play_publicly(self, tensors: list[Any]) -> None:
        tensors[self.place] = self.function(*(tensors[i] for i in self.sources))

    def play(self, stream: int, tensors: list[Any], addresses: list[int]) -> None:
        del stream
        result = tensors[self.place] = self.function(*(tensors[i] for i in self.sources))
        addresses[self.place] = result.data_ptr()


@dataclass(eq=False)
class _Launch:
    """One launch.

    Attributes:
        kernel: The function.
        grid: Its sizes.
        args: Its run-time arguments, None where a tensor of the call goes.
        constants: As it was launched with.
        options: Likewise.
        bound: What it was bound to.
        holes: Place among the arguments, place or places among the tensors, and template of a descriptor.
        run: What launches.
        flat: What it gets: a grid, a stream, and arguments.
        addresses: Place in flat and among the tensors.
        tuples: Place in flat, and places among the tensors.
        descriptors: First and last place in flat, place among the tensors, number, template, and what it became by address.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: list[Any]
    constants: dict[str, Any]
    options: dict[str, int]
    bound: Bound | None
    holes: list[tuple[int, Any, Template | None]] = field(default_factory=list)
    run: Callable[..., None] | None = None
    flat: list[Any] = field(default_factory=list)
    addresses: list[tuple[int, int]] = field(default_factory=list)
    tuples: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    descriptors: list[tuple[int, int, int, int, Template, dict[int, list[Any]]]] = field(default_factory=list)

    def flatten(self, tensors: Sequence[Tensor]) -> None:
        """Makes the flat arguments, those of the call that is recorded."""
        assert self.bound is not None, "only kernels that were taken apart have flat arguments"
        of = {at: (place, template) for at, place, template in self.holes}
        self.run, constants = (self.bound.run, ()) if self.bound.straight is None else self.bound.straight
        self.flat += [*(*self.grid, 1, 1)[:3], 0, *constants]
        for at, x in enumerate(self.args):
            place, template = of.get(at, (None, None))
            here = len(self.flat)
            if template is not None:
                number = len(self.descriptors)
                self.flat += self.bound.encoding(number, template, tensors[place].data_ptr())
                self.descriptors.append((here, len(self.flat), place, number, template, {}))
                continue
            if isinstance(place, tuple):
                self.tuples.append((here, place))
            elif place is not None:
                self.addresses.append((here, place))
            self.flat.append(x.data_ptr() if isinstance(x, Tensor) else x)
        self.flat += self.bound.tail

    def moved(self, places: Sequence[int], known: Mapping[int, int]) -> _Launch:
        """The same with its tensors at other places, and with addresses that are known there."""
        step = _Launch(self.kernel, self.grid, self.args, self.constants, self.options, self.bound, run=self.run)
        flat = step.flat = self.flat.copy()
        bound: Any = self.bound
        for at, place in self.addresses:
            if places[place] in known:
                flat[at] = known[places[place]]
            else:
                step.addresses.append((at, places[place]))
        for at, several in self.tuples:
            there = tuple(places[place] for place in several)
            if known.keys() >= set(there):
                flat[at] = tuple(known[place] for place in there)
            else:
                step.tuples.append((at, there))
        for at, end, place, number, template, _ in self.descriptors:
            if places[place] in known:
                flat[at:end] = bound.encoding(number, template, known[places[place]])
            else:
                step.descriptors.append((at, end, places[place], number, template, {}))
        return step

    def play(self, stream: int, tensors: list[Any], addresses: list[int]) -> None:
        del tensors
        flat = self.flat.copy()
        flat[_STREAM] = stream
        for at, place in self.addresses:
            flat[at] = addresses[place]
        for at, places in self.tuples:
            flat[at] = tuple([addresses[place] for place in places])
        bound: Any = self.bound
        run: Any = self.run
        for at, end, place, number, template, encoded in self.descriptors:
            address = addresses[place]
            found = encoded.get(address)
            if found is None:
                if len(encoded) >= _ENCODED:
                    encoded.clear()
                found = encoded[address] = bound.encoding(number, template, address)
            flat[at:end] = found
        run(*flat)

    def play_publicly(self, tensors: list[Any]) -> None:
        args = list(self.args)
        for at, place, template in self.holes:
            if template is not None:
                args[at] = template.over(tensors[place])
            else:
                args[at] = tuple(tensors[i] for i in place) if isinstance(place, tuple) else tensors[place]
        launch_triton.launch(self.kernel, self.grid, args, self.constants, **self.options)


def _make_room(num_bytes: int, device: torch.device) -> Tensor:
    lease = _ear.lease
    return torch.empty(num_bytes, dtype=torch.uint8, device=device) if lease is None else lease.room(num_bytes, device)


def _lease_to(lease: Lease, played: Tape | Reel, steps: Sequence[_Launch | _Make]) -> None:
    """Lets a lease keep what is played, and know whether that makes tensors."""
    lease.held.append(played)
    lease.whole &= all(isinstance(step, _Launch) or step.place in step.sources for step in steps)


def _on(index: int) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of a launch the current one."""
    if index < 0 or torch.cuda.current_device() == index:
        return _HERE
    return torch.cuda.device(index)
