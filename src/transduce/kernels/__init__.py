"""Kernels: `accelerate` makes models use the C++ library of `native/` on CPUs and Triton kernels on GPUs."""
