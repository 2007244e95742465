"""Constants that several rooms share: of the softmax in base 2, and of the GPU beside transfers."""

from __future__ import annotations

import math

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
COMM_SMS = 4
"""SMs that a launch leaves to transfers beside it: as many as a ring's NCCL communicator may use."""
