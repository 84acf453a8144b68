// Threads that share the pieces of a piece of work. A piece goes to the thread that is free: one that is slow, or whose core another
// process uses, takes fewer. Which thread takes a piece must not change a result.
#pragma once

#include <atomic>
#include <exception>
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

private:
    using Function = void (*)(void*, int);
    Pool() = default;
    void run(int n_threads, int n_pieces, Function function, void* work);
    void serve();
    bool take(std::unique_lock<std::mutex>& lock);

    std::mutex one_caller_, mutex_;
    Condition more_, done_;
    std::vector<std::thread> threads_;
    Function function_ = nullptr;
    void* work_ = nullptr;
    std::exception_ptr error_;
    int n_pieces_ = 0, next_ = 0, n_helpers_ = 0, n_helping_ = 0;
    std::atomic<int> n_done_{0};
    std::atomic<unsigned> n_runs_{0};
};

}  // namespace transduce
