// A pool of threads that share the pieces of a task. In calls with equal numbers of pieces, a thread has the same range of pieces, so that
// it finds data of the previous call in the cache of its core. After its own range, it takes pieces of other threads. Therefore a thread that
// is slow, or whose core another process uses, computes fewer pieces. Results must not depend on which thread computes a piece.
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
    // Returns the pool of this process; a forked process gets its own pool.
    static Pool& get();

    // Calls `work(piece)` for the pieces 0 to n_pieces - 1 in `n_threads` threads, including the calling thread; returns when all are done.
    // If several threads call `run`, they wait for each other. An exception in a piece is rethrown at the end.
    template <class Work>
    void run(int n_threads, int n_pieces, Work&& work) {
        run(n_threads, n_pieces, [](void* w, int piece) { (*static_cast<std::remove_reference_t<Work>*>(w))(piece); }, &work);
    }

    // Calls `work(piece, first row, n rows)` for pieces of `at_once` rows; the last piece may have fewer.
    template <class Work>
    void run_rows(int n_threads, int64_t rows, int64_t at_once, Work&& work) {
        run(n_threads, int((rows + at_once - 1) / at_once), [&](int piece) {
            const int64_t first = piece * at_once, left = rows - first;
            work(piece, first, left < at_once ? left : at_once);
        });
    }

    // Returns an object of type Kept that belongs to this thread and keeps its memory from call to call.
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
    std::vector<Range> ranges_;  // remaining pieces of each thread; the first range belongs to the calling thread
    int n_pieces_ = 0, n_taken_ = 0;
    std::atomic<int> n_done_{0};
    std::atomic<unsigned> n_runs_{0};
};

}  // namespace transduce
