#include "pool.h"

#include <unistd.h>

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

constexpr auto kSpin = std::chrono::microseconds(100);

// Waits a moment for what usually comes soon: to fall asleep and wake up takes longer.
template <class Ready>
void await(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    while (!ready() && std::chrono::steady_clock::now() < end)
        for (int i = 0; i < 16; i++) pause();
}

}  // namespace

Pool& Pool::get() {
    static std::mutex mutex;
    static Pool* pool = nullptr;  // never freed: its threads wait until the process ends
    static pid_t owner = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    if (owner != getpid()) pool = new Pool, owner = getpid();
    return *pool;
}

// Does the next piece, if there is one.
bool Pool::take(std::unique_lock<std::mutex>& lock) {
    if (next_ == n_pieces_) return false;
    const int piece = next_++;
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

void Pool::serve() {
    const FlushDenormals flush;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        if (next_ == n_pieces_) {
            const unsigned seen = n_runs_;
            lock.unlock();
            await([&] { return n_runs_ != seen; });
            lock.lock();
        }
        while (next_ == n_pieces_ || n_helping_ >= n_helpers_) more_.wait(lock);
        n_helping_++;
        while (take(lock)) continue;
        n_helping_--;
    }
}

void Pool::run(int n_threads, int n_pieces, Function function, void* work) {
    const FlushDenormals flush;
    const std::lock_guard<std::mutex> only(one_caller_);
    std::unique_lock<std::mutex> lock(mutex_);
    while (int(threads_.size()) < n_threads - 1) {
        threads_.emplace_back([this] { serve(); });
        threads_.back().detach();
    }
    n_runs_++;
    function_ = function, work_ = work, n_pieces_ = n_pieces, next_ = n_done_ = 0, n_helpers_ = n_threads - 1;
    if (n_threads > 1 && n_pieces > 1) more_.notify_all();
    while (take(lock)) continue;
    if (n_done_ < n_pieces_) {
        lock.unlock();
        await([&] { return n_done_ == n_pieces_; });
        lock.lock();
    }
    while (n_done_ < n_pieces_) done_.wait(lock);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace transduce
