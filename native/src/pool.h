// Threads that share the pieces of a task. Each has a range of them, the same one in every call with as many pieces, so that it
// reads what its own core has written; then it takes pieces of others. So a thread that is slow, or whose core another process uses, takes
// fewer. Which thread takes a piece must not change a result.
//
// Calls that use the pool can also be queued: one of its threads makes them, one after another, while their caller does something
// else. When the caller waits and that thread has no core, it makes one itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "condition.h"

namespace transduce {

class Pool {
public:
    // That of this process; a fork gets its own.
    static Pool& get();

    // Calls `work(piece)` for the pieces 0 to n_pieces - 1 in `n_threads` threads, the calling one among them; returns when all are
    // done. One caller at a time: others wait. What a piece throws is thrown again at the end.
    template <class Work>
    void run(int n_threads, int n_pieces, Work&& work) {
        run(n_threads, n_pieces, [](void* w, int piece) { (*static_cast<std::remove_reference_t<Work>*>(w))(piece); }, &work);
    }

    // Calls `work(piece, first, n)` for pieces of `at_once` rows; the last one may have fewer.
    template <class Work>
    void run_rows(int n_threads, int64_t rows, int64_t at_once, Work&& work) {
        run(n_threads, int((rows + at_once - 1) / at_once), [&](int piece) {
            const int64_t first = piece * at_once, left = rows - first;
            work(piece, first, left < at_once ? left : at_once);
        });
    }

    // Queues a call, which one of the `n_threads` threads makes after those before it; not if one of them has failed.
    void add(int n_threads, std::function<void()> call);

    // If more than `most` calls are unfinished, makes calls and pieces until at most half as many are. Returns how many are.
    int64_t wait(int64_t most);

    // Throws what a call has thrown.
    void rethrow_error();

    // Memory that is kept from call to call: each thread's own, and one for all queued calls, as these are made one after another.
    template <class Kept>
    static Kept& kept() {
        static Kept queued;
        static thread_local Kept own;
        return is_in_queued_call() ? queued : own;
    }

private:
    using Function = void (*)(void*, int);
    Pool() = default;
    void run(int n_threads, int n_pieces, Function function, void* work);
    void start_threads(int n);
    void serve(int thread);
    bool take(int thread, std::unique_lock<std::mutex>& lock);
    bool make_call(std::unique_lock<std::mutex>& lock);
    static bool is_in_queued_call();
    void spin(unsigned seen, std::unique_lock<std::mutex>& lock);
    void sleep(unsigned seen, std::unique_lock<std::mutex>& lock);
    int next_piece(int thread);

    std::mutex one_caller_, mutex_;
    Condition more_, done_;
    std::vector<std::thread> threads_;
    Function function_ = nullptr;
    void* work_ = nullptr;
    std::exception_ptr error_;
    struct Range {
        int first = 0, end = 0;
    };
    std::vector<Range> ranges_;  // of pieces that no thread has taken, for each thread; first for one that is not the pool's
    int n_pieces_ = 0, n_taken_ = 0;
    std::atomic<int> n_done_{0};
    std::atomic<unsigned> n_events_{0};  // runs, and calls that were added or made
    std::deque<std::function<void()>> calls_;
    int64_t n_left_ = 0;  // calls that are not made
    bool is_making_ = false;  // whether a thread makes a call now
    std::exception_ptr call_error_;
};

}  // namespace transduce
