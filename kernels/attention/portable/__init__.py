"""Plain Triton kernels: any CUDA or ROCm device, and the interpreter."""
