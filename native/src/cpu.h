// The instruction set that this process uses, found out once.
#pragma once

namespace transduce {

enum class Isa { portable, avx2, avx512, avx512_vnni, amx };  // each includes those before it

// The best instruction set of this CPU that the operating system supports and that this library was built with.
Isa best_isa();

// `best_isa()`, or the one that the environment variable TRANSDUCE_NATIVE_ISA names. Throws std::invalid_argument if it
// is unknown or not available.
Isa chosen_isa();

// Whether the CPU has AVX-512's bfloat16 products.
bool has_bf16();

const char* name_of(Isa isa);

}  // namespace transduce
