"""Memory, time and the best mesh of a job before it runs: a cost model of measured parts over the plans of the library."""

from ringattn.sizing.estimate import Estimate, Mesh, MeshEstimate, attention_estimate, estimate
from ringattn.sizing.memory import Memory, Savings
from ringattn.sizing.packing import PackedBatch, PackedSequence, pack, place
from ringattn.sizing.profile import Profile, load_profile, write_profile
from ringattn.sizing.shapes import PRESETS, ModelShape, load_shape
from ringattn.sizing.step import Seconds

__all__ = [
    "PRESETS",
    "Estimate",
    "Memory",
    "Mesh",
    "MeshEstimate",
    "ModelShape",
    "PackedBatch",
    "PackedSequence",
    "Profile",
    "Savings",
    "Seconds",
    "attention_estimate",
    "estimate",
    "load_profile",
    "load_shape",
    "pack",
    "place",
    "write_profile",
]
