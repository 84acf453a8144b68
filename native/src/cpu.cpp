#include "cpu.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "platform.h"

namespace transduce {
namespace {

constexpr const char* kNames[] = {"portable", "neon_dot", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_vnni", "amx"};

constexpr unsigned bit(Isa isa) { return 1u << int(isa); }

#if defined(__x86_64__)

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned part) {
    Registers r;
    __get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d);
    return r;
}

bool has(unsigned word, int bit) { return word >> bit & 1; }

// Which register files the operating system saves when it switches threads.
uint64_t saved_state() {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

unsigned detect() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
    const bool os_saves = has(one.c, 27);
    const uint64_t saved = os_saves ? saved_state() : 0;
    constexpr uint64_t kAvx = 0x6, kAvx512 = 0xe6, kTiles = 0x60000;
    unsigned found = bit(Isa::portable);
    if ((saved & kAvx) != kAvx || !has(one.c, 12) || !has(seven.b, 5) || !has(seven.b, 8)) return found;  // FMA, AVX2, BMI2
    found |= bit(Isa::avx2);
    if (has(more.a, 4)) found |= bit(Isa::avx_vnni);
#if defined(TRANSDUCE_EMULATED_AVX512)
    found |= bit(Isa::avx_vnni) | bit(Isa::avx512) | bit(Isa::avx512_vnni);
#if defined(TRANSDUCE_EMULATED_TILES)
    found |= bit(Isa::amx);
#endif
    return found;
#endif
    const bool avx512 = (saved & kAvx512) == kAvx512 && has(seven.b, 16) && has(seven.b, 17) && has(seven.b, 30) &&
                        has(seven.b, 31);  // F, DQ, BW, VL
    if (!avx512) return found;
    found |= bit(Isa::avx512);
    if (!has(seven.c, 11)) return found;  // VNNI
    found |= bit(Isa::avx512_vnni);
#if defined(TRANSDUCE_EMULATED_TILES)
    if (has(more.a, 5)) return found | bit(Isa::amx);
#endif
    const bool amx = (saved & kTiles) == kTiles && has(seven.d, 24) && has(seven.d, 25) && has(seven.d, 22) &&
                     has(more.a, 5);  // tiles, int8, bf16 products; AVX-512 conversions to bf16
    return amx && request_amx_tiles() ? found | bit(Isa::amx) : found;
}

#else

unsigned detect() {
    const bool dot = has_arm_dot_product(), i8mm = dot && has_arm_i8mm();
    return bit(Isa::portable) | (dot ? bit(Isa::neon_dot) : 0) | (i8mm ? bit(Isa::neon_i8mm) : 0);
}

#endif

bool available(Isa isa) {
    static const unsigned found = detect();
    return found & bit(isa);
}

}  // namespace

Isa chosen_isa() {
    const char* wanted = std::getenv("TRANSDUCE_NATIVE_ISA");
    Isa best = Isa::portable;
    std::string names;
    for (int i = 0; i <= int(Isa::amx); i++) {
        if (!available(Isa(i))) continue;
        best = Isa(i);
        if (wanted && std::strcmp(wanted, kNames[i]) == 0) return best;
        names += (i ? ", " : "") + std::string(kNames[i]);
    }
    if (wanted && *wanted) throw std::invalid_argument("TRANSDUCE_NATIVE_ISA = " + std::string(wanted) + ": this CPU offers " + names);
    return best;
}

bool has_bf16() {
#if defined(__x86_64__)
    static const bool found = available(Isa::avx512_vnni) && has(cpuid(7, 1).a, 5);
    return found;
#else
    return false;
#endif
}

const char* name_of(Isa isa) { return kNames[int(isa)]; }

}  // namespace transduce
