"""Gluon kernels for compute capability 9.0: TMA, wgmma and warp specialisation by hand."""
