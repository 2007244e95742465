"""The Hopper kernel set: `KernelSet` of interface.py in Gluon, for fp16 and bf16 on compute capability 9.0.

Products are of fp16 or bf16 operands, everything else is fp32.
"""

from __future__ import annotations

from torch import Tensor

from ringattn.kernels.attention.hopper.launcher import BoundCall, launch_backward, launch_forward
from ringattn.kernels.attention.portable.api import PortableKernels, portable_delta
from ringattn.kernels.interface import Arrivals, BackwardStep, CallShape, GatheredKeys, Grads, KernelSet, Returns, Step
from ringattn.kernels.runtime import bound_launch


class HopperKernels(KernelSet):
    """`KernelSet` of Gluon kernels.

    Attributes:
        bound: Kernels and the shapes of their launches; a measurement may change them.
    """

    def __init__(self, call: CallShape) -> None:
        super().__init__(call)
        self.bound = BoundCall(call)

    def can_capture(self) -> bool:
        """`KernelSet.can_capture`: hooks on launches would miss a replay."""
        return not bound_launch.is_hooked()

    def can_fuse(self) -> bool:
        """`KernelSet.can_fuse`: always, since the registry admits neither a bias nor rows that are no whole words."""
        return True

    def forward(self, step: Step) -> None:
        """`KernelSet.forward`."""
        if step.q.numel() == 0 or not (step.first or step.last or step.k.shape[1]):
            return
        if step.k.shape[1] == 0:
            # nothing is multiplied: the identity, the sinks or the carry become the result
            PortableKernels(self.call).forward(step)
            return
        launch_forward(self.bound, step, None)

    def delta(self, o: Tensor, do: Tensor, dlse: Tensor | None, out: Tensor | None = None) -> Tensor:
        """`KernelSet.delta`."""
        return portable_delta(o, do, dlse, out)

    def backward(self, step: BackwardStep, grads: Grads) -> None:
        """`KernelSet.backward`."""
        launch_backward(self.bound, step, grads)

    def forward_fused(self, step: Step, arrivals: Arrivals) -> None:
        """`KernelSet.forward_fused`."""
        keys = step.keys
        assert isinstance(keys, GatheredKeys), "a fused call has all key sides"
        if step.q.numel() == 0:
            return
        if len(keys.sides) == 1:
            self.forward(step._replace(keys=keys.sides[0]))
            return
        if step.k.shape[1] == 0:
            # hidden blocks are read from the local buffer: one row of zeros stands for none
            k, v = (x.new_zeros(x.shape[0], 1, *x.shape[2:]) for x in (step.k, step.v))
            step = step._replace(k=k, v=v)
        # a copy of the remote buffer would be made before it is filled
        assert all(map(self.bound.descriptors.describable, arrivals[:2])), "remote rows are whole words of 16 bytes"
        launch_forward(self.bound, step, arrivals)

    def backward_fused(self, step: BackwardStep, arrivals: Arrivals, returns: Returns, grads: Grads) -> None:
        """`KernelSet.backward_fused`."""
        launch_backward(self.bound, step, grads, arrivals, returns)
