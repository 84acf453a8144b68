// The code that differs between Linux, macOS and Windows. The rest of the library is standard C++.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>

#if defined(__linux__)
#include <pthread.h>
#include <time.h>
#endif

namespace transduce {

// Allocates `bytes`, a multiple of 64, at an address that is a multiple of 64; returns null if there is too little memory.
void* allocate_aligned(size_t bytes);
void free_aligned(void* memory);

// The id of this process; a forked process has another id.
int process_id();

// Capabilities of the CPU that the operating system reports or permits.
bool has_arm_dot_product();   // `sdot`, an instruction for products of 8-bit integers
bool has_arm_i8mm();          // `smmla`, an instruction for products of 8-bit matrices
bool request_amx_tiles();     // Linux gives a process the tile registers only on request; false if there are none

// A pipe that wakes an event loop: between `ring` and `silence` it can be read. The constructor throws on Windows, whose event loops wait only
// for sockets.
class Bell {
public:
    Bell();
    ~Bell();
    Bell(const Bell&) = delete;
    Bell& operator=(const Bell&) = delete;
    int fd() const { return ends_[0]; }
    void ring() const;
    void silence() const;

private:
    int ends_[2];
};

#if defined(__linux__)
// A condition variable that waits by the monotonic clock. std::condition_variable does so too, but compiled against a
// current glibc it needs pthread_cond_clockwait (glibc 2.30) and the C++ runtime of GCC 12.
class Condition {
public:
    Condition() {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&condition_, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    ~Condition() { pthread_cond_destroy(&condition_); }
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;

    void notify_one() { pthread_cond_signal(&condition_); }
    void notify_all() { pthread_cond_broadcast(&condition_); }

    void wait(std::unique_lock<std::mutex>& lock) { pthread_cond_wait(&condition_, lock.mutex()->native_handle()); }

    // steady_clock counts from the start of CLOCK_MONOTONIC.
    void wait_until(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point until) {
        using namespace std::chrono;
        const auto whole = floor<seconds>(until);
        timespec time = {};
        time.tv_sec = time_t(whole.time_since_epoch().count());
        time.tv_nsec = long(nanoseconds(until - whole).count());
        pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &time);
    }

private:
    pthread_cond_t condition_;
};
#else
using Condition = std::condition_variable;
#endif

}  // namespace transduce
