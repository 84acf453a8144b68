"""`accelerate`, the C++ library of `native/` with its loader, kernels in Triton, and the optimizers of the library."""
