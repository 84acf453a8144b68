// Threads that share the pieces of a task. Each thread has a range of pieces, the same in every call with that number of pieces, so that it
// finds data of the previous call in the cache of its core. After its own range, it takes pieces of other threads. A thread that is slow, or
// whose core another process uses, therefore computes fewer pieces. Results must not depend on which thread computes a piece.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "platform.h"

namespace transduce {

class Pool {
public:
    // The pool of this process; a fork gets its own.
    static Pool& get();

    // Calls `work(piece)` for the pieces 0 to n_pieces - 1 in `n_threads` threads, the calling one among them; returns when all are
    // done. One caller at a time: others wait. An exception in a piece is rethrown at the end.
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

    // An object of each thread that keeps its memory from call to call.
    template <class Kept>
    static Kept& kept() {
        static thread_local Kept own;
        return own;
    }

private:
    using Function = void (*)(void*, int);
    Pool() = default;
    void run(int n_threads, int n_pieces, Function function, void* work);
    void start_threads(int n);
    void serve(int thread);
    bool take(int thread, std::unique_lock<std::mutex>& lock);
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
    std::vector<Range> ranges_;  // remaining pieces of each thread; the first is the calling thread, which is not in the pool
    int n_pieces_ = 0, n_taken_ = 0;
    std::atomic<int> n_done_{0};
    std::atomic<unsigned> n_runs_{0};
};

}  // namespace transduce
