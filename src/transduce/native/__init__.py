"""The C++ library of `native/`: how it is loaded. It decodes and scores, and trains where the CPU has its kernels."""
