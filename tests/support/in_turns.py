"""Hopper kernels of which the one that makes dq, dk and dv adds dq in turns, however long tiles wait for theirs."""

from __future__ import annotations

from ringattn.kernels.attention.hopper.api import HopperKernels
from ringattn.kernels.interface import CallShape


class InTurns(HopperKernels):
    """`HopperKernels` with `deterministic`, wherever one launch can make the gradients."""

    def __init__(self, call: CallShape) -> None:
        super().__init__(call)
        self.bound.deterministic = self.bound.in_turns = True
