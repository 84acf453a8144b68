// An array of numbers that is aligned to cache lines, initially zero, and freed with its owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "platform.h"

namespace transduce {

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t size) { reset(size); }
    ~Buffer() { free(); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }

    // Resizes to zeros; earlier contents are lost.
    void reset(size_t size) {
        free();
        if (!size) return;
        if (size > SIZE_MAX / sizeof(T) - 64) throw std::bad_alloc();
        const size_t bytes = (size * sizeof(T) + 63) / 64 * 64;
        data_ = static_cast<T*>(allocate_aligned(bytes));
        if (!data_) throw std::bad_alloc();
        std::memset(data_, 0, bytes);
        size_ = size;
    }
    // Makes room for at least `size` elements; contents are lost if the buffer has to grow.
    void reserve(size_t size) {
        if (size > size_) reset(size);
    }
    T* data() { return data_; }
    const T* data() const { return data_; }
    size_t size() const { return size_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

private:
    void free() {
        free_aligned(data_);
        data_ = nullptr, size_ = 0;
    }

    T* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace transduce
