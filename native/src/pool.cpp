#include "pool.h"

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

constexpr auto kSpin = std::chrono::microseconds(300);
constexpr auto kTurn = std::chrono::milliseconds(1);  // after which a thread gives its core away for a moment

// Spins until `ready` or for `kSpin`: an event that comes soon takes less time than sleeping and waking up.
template <class Ready>
void await(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (!ready() && std::chrono::steady_clock::now() < end)
        for (int i = 0; i < 16; i++) pause();
}

// Called between two pieces: after each `kTurn`, offers this core to other processes. If the system took the core in the middle of a piece,
// the other threads would have to wait for that piece; between pieces they can go on with the next ones.
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
    static std::atomic<int> owner{0};
    if (owner == process_id()) return *pool;  // without the mutex, which a thread that a fork left behind could hold
    const std::lock_guard<std::mutex> lock(mutex);
    if (owner != process_id()) pool = new Pool, owner = process_id();
    return *pool;
}

// The next piece of the thread's own range, or else the last piece of the longest remaining range.
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

// Spins for a moment until a run after the run number `seen` begins.
void Pool::spin(unsigned seen, std::unique_lock<std::mutex>& lock) {
    if (n_runs_ != seen) return;
    lock.unlock();
    await([&] { return n_runs_ != seen; });
    lock.lock();
}

void Pool::sleep(unsigned seen, std::unique_lock<std::mutex>& lock) {
    while (n_runs_ == seen) more_.wait(lock);
}

void Pool::serve(int thread) {
    const FlushDenormals flush;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        yield(lock);
        const unsigned seen = n_runs_;
        if (take(thread, lock)) continue;
        if (thread < int(ranges_.size())) spin(seen, lock);
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
    n_runs_++;
    function_ = function, work_ = work, n_pieces_ = n_pieces, n_taken_ = n_done_ = 0;
    for (int t = 0; t < n_threads; t++) ranges_[t] = {int(int64_t(n_pieces) * t / n_threads), int(int64_t(n_pieces) * (t + 1) / n_threads)};
    if (n_threads > 1 && n_pieces > 1) more_.notify_all();
    while (take(0, lock)) continue;
    if (n_done_ < n_pieces_) {
        lock.unlock();
        await([&] { return n_done_ == n_pieces_; });
        lock.lock();
    }
    while (n_done_ < n_pieces_) done_.wait(lock);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace transduce
