"""Memory, time and the best mesh of a job before it runs: a cost model of measured parts over the plans of the library."""

from ringattn.planning.estimate import Estimate, Mesh, MeshEstimate, attention_estimate, estimate
from ringattn.planning.memory import Memory
from ringattn.planning.packing import PackedBatch, PackedSequence, pack, place
from ringattn.planning.profile import Profile, load_profile, write_profile
from ringattn.planning.shapes import PRESETS, ModelShape, load_shape
from ringattn.planning.step import Seconds

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
    "Seconds",
    "attention_estimate",
    "estimate",
    "load_profile",
    "load_shape",
    "pack",
    "place",
    "write_profile",
]
