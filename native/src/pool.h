// Threads that share the pieces of a task. Each has a range of them, the same one in every call with as many pieces, so that it
// reads what its own core has written; then it takes pieces of others. So a thread that is slow, or whose core another process uses, takes
// fewer. Which thread takes a piece must not change a result.
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

    // Memory of each thread that is kept from call to call.
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
    std::vector<Range> ranges_;  // of pieces that no thread has taken, for each thread; first for one that is not the pool's
    int n_pieces_ = 0, n_taken_ = 0;
    std::atomic<int> n_done_{0};
    std::atomic<unsigned> n_runs_{0};
};

}  // namespace transduce
