#include "cpu.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace transduce {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_vnni", "amx"};

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

// Linux gives a process the AMX tile registers only on request.
bool request_tiles() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

Isa detect() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
    const bool os_saves = has(one.c, 27);
    const uint64_t saved = os_saves ? saved_state() : 0;
    constexpr uint64_t kAvx = 0x6, kAvx512 = 0xe6, kTiles = 0x60000;
    if ((saved & kAvx) != kAvx || !has(one.c, 12) || !has(seven.b, 5) || !has(seven.b, 8)) {
        return Isa::portable;  // FMA, AVX2, BMI2
    }
    const bool avx512 = (saved & kAvx512) == kAvx512 && has(seven.b, 16) && has(seven.b, 17) && has(seven.b, 30) &&
                        has(seven.b, 31);  // F, DQ, BW, VL
    if (!avx512) return Isa::avx2;
    if (!has(seven.c, 11)) return Isa::avx512;  // VNNI
    const Registers more = cpuid(7, 1);
#if defined(TRANSDUCE_EMULATED_TILES)
    if (has(more.a, 5)) return Isa::amx;
#endif
    const bool amx = (saved & kTiles) == kTiles && has(seven.d, 24) && has(seven.d, 25) && has(seven.d, 22) &&
                     has(more.a, 5);  // tiles, int8, bf16 products; AVX-512 conversions to bf16
    return amx && request_tiles() ? Isa::amx : Isa::avx512_vnni;
}

#else

Isa detect() { return Isa::portable; }

#endif

}  // namespace

Isa best_isa() {
    static const Isa found = detect();
    return found;
}

Isa chosen_isa() {
    const char* wanted = std::getenv("TRANSDUCE_NATIVE_ISA");
    if (!wanted || !*wanted) return best_isa();
    for (int i = 0; i <= int(Isa::amx); i++) {
        if (std::strcmp(wanted, kNames[i]) != 0) continue;
        if (i > int(best_isa())) {
            throw std::invalid_argument(std::string("TRANSDUCE_NATIVE_ISA = ") + wanted + ": this CPU offers " +
                                        name_of(best_isa()));
        }
        return Isa(i);
    }
    throw std::invalid_argument(std::string("TRANSDUCE_NATIVE_ISA = ") + wanted +
                                ": allowed are portable, avx2, avx512, avx512_vnni and amx");
}

bool has_bf16() {
#if defined(__x86_64__)
    static const bool found = best_isa() >= Isa::avx512_vnni && has(cpuid(7, 1).a, 5);
    return found;
#else
    return false;
#endif
}

const char* name_of(Isa isa) { return kNames[int(isa)]; }

}  // namespace transduce
