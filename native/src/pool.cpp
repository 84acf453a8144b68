#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "denormals.h"

namespace transduce {
namespace {

inline void pause() {
#if defined(__SSE2__)
    __builtin_ia32_pause();
#endif
}

constexpr int kCallThread = 1;  // the thread of the pool that makes calls
thread_local int this_thread = 0;  // 0: not one of the pool's
thread_local bool in_queued_call = false;

constexpr auto kSpin = std::chrono::microseconds(300);
constexpr auto kTurn = std::chrono::milliseconds(1);  // after which a thread gives its core away for a moment

// Waits a moment for what usually comes soon: to fall asleep and wake up takes longer.
template <class Ready>
void await(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (!ready() && std::chrono::steady_clock::now() < end)
        for (int i = 0; i < 16; i++) pause();
}

// Between two pieces, or two queued calls, of a thread: now and then lets another process have this core. If the system took it
// in the middle of a piece, the other threads would wait for that piece; now they take the next ones.
void yield(std::unique_lock<std::mutex>& lock) {
    thread_local auto began = std::chrono::steady_clock::now();
    if (std::chrono::steady_clock::now() - began < kTurn) return;
    lock.unlock();
    std::this_thread::yield();
    began = std::chrono::steady_clock::now();
    lock.lock();
}

}  // namespace

Pool& Pool::get() {
    static std::mutex mutex;
    static std::atomic<Pool*> pool{nullptr};  // never freed: its threads wait until the process ends
    static std::atomic<pid_t> owner{0};
    if (owner == getpid()) return *pool;  // without the mutex, which a thread that a fork left behind could hold
    const std::lock_guard<std::mutex> lock(mutex);
    if (owner != getpid()) pool = new Pool, owner = getpid();
    return *pool;
}

// The next of the thread's own pieces, or the last one of the thread that has most left.
int Pool::next_piece(int thread) {
    Range& own = ranges_[thread];
    if (own.first < own.end) return own.first++;
    const auto left = [](const Range& range) { return range.end - range.first; };
    return --std::max_element(ranges_.begin(), ranges_.end(), [&](const Range& a, const Range& b) { return left(a) < left(b); })->end;
}

// Does a piece, if there is one for this thread.
bool Pool::take(int thread, std::unique_lock<std::mutex>& lock) {
    if (n_taken_ == n_pieces_ || thread >= int(ranges_.size())) return false;
    n_taken_++;
    const int piece = next_piece(thread);
    lock.unlock();
    std::exception_ptr error;
    try {
        function_(work_, piece);
    } catch (...) {
        error = std::current_exception();
    }
    lock.lock();
    if (error) error_ = error;
    if (++n_done_ == n_pieces_) done_.notify_one();
    return true;
}

bool Pool::is_in_queued_call() { return in_queued_call; }

// Makes the next call, if there is one and the last one is made.
bool Pool::make_call(std::unique_lock<std::mutex>& lock) {
    if (calls_.empty() || is_making_) return false;
    is_making_ = true;
    const auto call = std::move(calls_.front());
    calls_.pop_front();
    if (!call_error_) {
        lock.unlock();
        std::exception_ptr error;
        in_queued_call = true;
        try {
            call();
        } catch (...) {
            error = std::current_exception();
        }
        in_queued_call = false;
        lock.lock();
        call_error_ = error;
    }
    is_making_ = false;
    n_left_--, n_events_++;
    more_.notify_all();
    return true;
}

// Waits a moment for an event after `seen`.
void Pool::spin(unsigned seen, std::unique_lock<std::mutex>& lock) {
    if (n_events_ != seen) return;
    lock.unlock();
    await([&] { return n_events_ != seen; });
    lock.lock();
}

void Pool::sleep(unsigned seen, std::unique_lock<std::mutex>& lock) {
    while (n_events_ == seen) more_.wait(lock);
}

void Pool::serve(int thread) {
    const FlushDenormals flush;
    this_thread = thread;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        yield(lock);
        const unsigned seen = n_events_;
        if (take(thread, lock) || (thread == kCallThread && make_call(lock))) continue;
        if (thread < int(ranges_.size()) || thread == kCallThread) spin(seen, lock);
        sleep(seen, lock);
    }
}

void Pool::start_threads(int n) {
    while (int(threads_.size()) < n - 1) {
        threads_.emplace_back([this, thread = int(threads_.size()) + 1] { serve(thread); });
        threads_.back().detach();
    }
}

void Pool::run(int n_threads, int n_pieces, Function function, void* work) {
    const FlushDenormals flush;
    const std::lock_guard<std::mutex> only(one_caller_);
    std::unique_lock<std::mutex> lock(mutex_);
    start_threads(n_threads);
    ranges_.resize(n_threads);
    n_events_++;
    function_ = function, work_ = work, n_pieces_ = n_pieces, n_taken_ = n_done_ = 0;
    for (int t = 0; t < n_threads; t++) ranges_[t] = {int(int64_t(n_pieces) * t / n_threads), int(int64_t(n_pieces) * (t + 1) / n_threads)};
    if (n_threads > 1 && n_pieces > 1) more_.notify_all();
    while (take(std::min(this_thread, n_threads - 1), lock)) continue;  // a queued call is usually made by a thread of the pool
    if (n_done_ < n_pieces_) {
        lock.unlock();
        await([&] { return n_done_ == n_pieces_; });
        lock.lock();
    }
    while (n_done_ < n_pieces_) done_.wait(lock);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::add(int n_threads, std::function<void()> call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_threads(n_threads);
    calls_.push_back(std::move(call));
    n_left_++, n_events_++;
    more_.notify_all();
}

int64_t Pool::wait(int64_t most) {
    const FlushDenormals flush;
    std::unique_lock<std::mutex> lock(mutex_);
    if (n_left_ > most)
        while (n_left_ > most / 2) {
            const unsigned seen = n_events_;
            if (!take(this_thread, lock)) {
                spin(seen, lock);
                // If the thread that makes calls has not begun the next one by now, it has no core.
                if (n_events_ == seen && !make_call(lock)) sleep(seen, lock);
            }
            yield(lock);
        }
    return n_left_;
}

void Pool::rethrow_error() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (call_error_) std::rethrow_exception(std::exchange(call_error_, nullptr));
}

}  // namespace transduce
