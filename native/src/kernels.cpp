#include "kernels.h"

#include <cmath>

namespace transduce {

float log_sum_exp(const RowBest& row) {
    float sum = 0;
    for (float part : row.sum) sum += part;
    return row.shift + std::log(sum);
}

const Kernels& kernels_for(Isa isa) {
#if defined(__x86_64__)
    switch (isa) {
    case Isa::amx: return kAmxKernels;
    case Isa::avx512_vnni: return kVnniKernels;
    case Isa::avx512: return kAvx512Kernels;
    case Isa::avx_vnni: return kAvxVnniKernels;
    case Isa::avx2: return kAvx2Kernels;
    default: return kPortableKernels;
    }
#elif defined(__aarch64__)
    return isa == Isa::neon_i8mm ? kNeonI8mmKernels : isa == Isa::neon_dot ? kNeonDotKernels : kPortableKernels;
#else
    return (void)isa, kPortableKernels;
#endif
}

}  // namespace transduce
