#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace transduce {

// Denormal numbers, which do not matter here, cost a hundred cycles each: they count as zero while this lives.
class [[maybe_unused]] FlushDenormals {
#if defined(__SSE2__)
public:
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }

private:
    unsigned before_;
#endif
};

}  // namespace transduce
