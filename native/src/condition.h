// A condition variable that waits by the monotonic clock. std::condition_variable does so too, but compiled against a
// current glibc it needs pthread_cond_clockwait (glibc 2.30) and the C++ runtime of GCC 12.
#pragma once

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <mutex>

namespace transduce {

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

}  // namespace transduce
