// Common parts of the C interface: checks, and the conversion of exceptions to codes and messages.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>

#include "transduce_native.h"

namespace transduce::abi {

constexpr int kMaxThreads = 1024;
constexpr int32_t kMaxSource = 1 << 16;

// Stores the message that `transduce_last_error` returns in this thread; returns `code`.
int fail(int code, const char* reason) noexcept;

template <class Work>
int guarded(Work work) noexcept {
    try {
        work();
        return TRANSDUCE_OK;
    } catch (const std::invalid_argument& error) {
        return fail(TRANSDUCE_INVALID, error.what());
    } catch (const std::bad_alloc&) {
        return fail(TRANSDUCE_MEMORY, "out of memory");
    } catch (const std::length_error&) {
        return fail(TRANSDUCE_MEMORY, "out of memory");
    } catch (const std::exception& error) {
        return fail(TRANSDUCE_INTERNAL, error.what());
    } catch (...) {
        return fail(TRANSDUCE_INTERNAL, "unknown error");
    }
}

inline void require(bool fine, const char* problem) {
    if (!fine) throw std::invalid_argument(problem);
}

}  // namespace transduce::abi
