from __future__ import annotations

import pytest

pytest.importorskip("triton")
configs = pytest.importorskip("ringattn.kernels.attention.portable.configs")

from tests.kernels.compile import offline  # noqa: E402

KERNELS = ("forward", "keys", "rows")
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_OPS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
EVERYTHING = ("softcap", "sinks", "alibi", "key_bias", "bias", "dropout")

PLAIN = [(kernel, arch, head_dim) for head_dim in (64, 128) for kernel in KERNELS for arch in SHARED]
RICH = [(kernel, 90, 128) for kernel in KERNELS]

pytestmark = pytest.mark.compile


def compiled(kernel: str, arch: int, head_dim: int, *, plain: bool) -> offline.Report:
    config = configs.choose(f"sm{arch}", 2, head_dim, kernel, plain)
    features = () if plain else EVERYTHING
    return offline.compile_kernel(kernel, arch, config, head_dim=head_dim, features=features)


@pytest.mark.parametrize(("kernel", "arch", "head_dim"), PLAIN)
def test_plain_kernels_fit_and_do_not_spill_in_their_loops(kernel: str, arch: int, head_dim: int):
    report = compiled(kernel, arch, head_dim, plain=True)
    assert report.loop_spills == 0, report
    assert report.shared <= SHARED[arch], report
    assert TENSOR_OPS[arch] in report.tensor_ops, report
    assert not report.warnings, report


@pytest.mark.parametrize("features", [("terms",), offline.OF_MASKS], ids=["terms", "tables"])
@pytest.mark.parametrize(("kernel", "arch"), [("forward", 90), ("keys", 90), ("rows", 80)])
def test_kernels_of_several_terms_fit(kernel: str, arch: int, features: tuple[str, ...]):
    config = configs.choose(f"sm{arch}", 2, 128, kernel, True)
    report = offline.compile_kernel(kernel, arch, config, head_dim=128, features=features)
    assert report.shared <= SHARED[arch], report
    assert TENSOR_OPS[arch] in report.tensor_ops, report


@pytest.mark.parametrize(("kernel", "arch", "head_dim"), RICH)
def test_kernels_with_every_feature_fit(kernel: str, arch: int, head_dim: int):
    report = compiled(kernel, arch, head_dim, plain=False)
    assert report.shared <= SHARED[arch], report
    assert TENSOR_OPS[arch] in report.tensor_ops, report
