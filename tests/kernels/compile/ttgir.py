"""Reads the loops of a kernel in its TTGIR, the last form in which they are loops.

Owns the notion of a stale bound. Knows no kernel.

Note [Stale bounds]
    The outermost loop of a persistent kernel walks the entries of a plan, and how often its inner loops turn is a number of
    the entry. Where such a number is loaded at the end of a round, carried to the next, and only ever a bound, Triton 3.6.0
    and 3.7.1 drop what is carried and keep what was loaded before the first round: every round is then as long as the first,
    and warpgroups that count differently wait for one another forever. Whoever runs the source without the compiler sees
    nothing of it. So the bound of an inner loop must rest on something of its round, or on arguments and constants alone.
    Triton 3.8.0 carries them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = r"%[\w$.-]+"
_DEFINITION = re.compile(rf"^({_NAME}(?::\d+)?(?:, {_NAME}(?::\d+)?)*) = (.*)$")
_LOOP = re.compile(rf"scf\.for (?:unsigned )?({_NAME}) = ({_NAME})(?:#\d+)? to ({_NAME})(?:#\d+)? step")
_SCOPE = re.compile(r"^(?:tt\.func|partition\d+\()")  # neither sees names from outside
_CALCULATION = re.compile(r"^(?:arith|math)\.(?!constant)")
_FIXED = re.compile(r"^(?:arith\.constant|tt\.get_program_id|tt\.get_num_programs|$)")


@dataclass(frozen=True)
class _Value:
    """How a name came to be.

    Attributes:
        operation: Without results; "" for arguments of functions, partitions and loops.
        operands: The names in it.
        moves: It is made anew in each round of the outermost loop.
    """

    operation: str
    operands: tuple[str, ...]
    moves: bool


@dataclass
class _Scope:
    """The names of a function or partition, and the indentation of the loops that are open."""

    values: dict[str, _Value] = field(default_factory=dict)
    loops: list[int] = field(default_factory=list)

    def origins(self, name: str) -> list[_Value]:
        """What calculations ended in this name started from."""
        seen, found, waiting = {name}, [], [name]
        while waiting:
            value = self.values.get(waiting.pop(), _Value("", (), False))
            if not _CALCULATION.match(value.operation):
                found.append(value)
                continue
            waiting += [operand for operand in value.operands if operand not in seen]
            seen.update(value.operands)
        return found

    def is_stale(self, name: str) -> bool:
        """Whether a bound is the same in all rounds of the outermost loop, and was not known before the launch."""
        origins = self.origins(name)
        return not any(x.moves for x in origins) and not all(_FIXED.match(x.operation) for x in origins)


def stale_bounds(ttgir: str) -> tuple[str, ...]:
    """The inner loops with a stale bound, each in a sentence; Note [Stale bounds]."""
    found: list[str] = []
    scope = _Scope()
    for number, text in enumerate(ttgir.splitlines(), 1):
        line, indentation = text.strip(), len(text) - len(text.lstrip())
        while scope.loops and line.startswith("}") and indentation <= scope.loops[-1]:
            scope.loops.pop()
        if _SCOPE.match(line):
            scope = _Scope()
            continue
        definition = _DEFINITION.match(line)
        operation = definition.group(2) if definition else line
        loop = _LOOP.search(operation)
        if loop is not None:
            counter, *bounds = loop.groups()
            if scope.loops:
                found += [
                    f"line {number}: {bound}, a bound of the loop over {counter}, is the same in all rounds around it"
                    for bound in bounds
                    if scope.is_stale(bound)
                ]
            scope.loops.append(indentation)
            for name in (counter, *re.findall(rf"({_NAME}) = {_NAME}", operation)):
                scope.values[name] = _Value("", (), True)
        if definition is not None:
            moves = len(scope.loops) > (loop is not None)
            value = _Value(operation, tuple(re.findall(_NAME, operation)), moves)
            for name in re.findall(_NAME, definition.group(1)):
                scope.values[name] = value
    return tuple(found)
