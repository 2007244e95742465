"""Constants of the softmax in base 2, in which statistics are kept inside kernels."""

from __future__ import annotations

import math

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
