// What the functions of the C interface share: checks, and exceptions as codes and messages.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "transduce_native.h"

namespace transduce::abi {

constexpr int kMaxThreads = 1024;
constexpr int32_t kMaxSource = 1 << 16;

// The error of another call, perhaps in another thread.
struct Failure {
    int code;
    std::string reason;
};

// Keeps the reason for `transduce_last_error` of this thread; returns the code.
int fail(int code, const char* reason) noexcept;

// Passes on the error of a call in this thread.
void pass_on(int32_t code);

template <class Work>
int guarded(Work work) noexcept {
    try {
        work();
        return TRANSDUCE_OK;
    } catch (const Failure& failure) {
        return fail(failure.code, failure.reason.c_str());
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
