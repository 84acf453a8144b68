#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace transduce {

// Treats denormal numbers as zero while the object exists: each costs about a hundred cycles, and results do not need them.
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
