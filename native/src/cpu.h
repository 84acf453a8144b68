// The instruction set that this process uses, detected once.
#pragma once

namespace transduce {

// Instruction sets, slowest first. A CPU with AVX-512 may lack AVX-VNNI.
enum class Isa { portable, neon_dot, neon_i8mm, avx2, avx_vnni, avx512, avx512_vnni, amx };

// The best instruction set of this CPU that the operating system supports and that this library was built with, or the one that the
// environment variable TRANSDUCE_NATIVE_ISA names. Throws std::invalid_argument if that is not available.
Isa chosen_isa();

// Whether the CPU has AVX-512's bfloat16 products.
bool has_bf16();

const char* name_of(Isa isa);

}  // namespace transduce
