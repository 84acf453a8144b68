// Jobs: sentences that several threads translate, each thread its own stream of them.
//
// A thread takes some sentences, encodes them, and advances all its live hypotheses by one token per step. When sentences are
// done, others take their places at once, so the number of rows stays near its best. A sentence's result depends on the
// sentence, the model and the options only.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "model.h"
#include "search.h"

namespace transduce {

class Worker;

// Keeps the workers of finished jobs: their memory is allocated once.
class WorkerPool {
public:
    WorkerPool();
    ~WorkerPool();
    std::unique_ptr<Worker> take(const Model& model);
    void put_back(std::unique_ptr<Worker> worker);

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Worker>> workers_;
};

struct Job {
    const Model* model = nullptr;
    WorkerPool* pool = nullptr;
    SearchOptions options;
    int n_threads = 1;
    std::vector<int32_t> ids, limits;
    std::vector<int64_t> offsets;
    std::vector<std::vector<Finished>> results;  // each written by one thread
    std::atomic<bool> cancelled{false};

    int64_t n_sentences() const { return int64_t(limits.size()); }
    int length(int64_t sentence) const { return int(offsets[sentence + 1] - offsets[sentence]); }
    // After ids, limits and offsets are set.
    void plan();
    // The next sentences, longest first: at most `most`, about `tokens` source tokens, but at least one if any is left.
    void take(int most, int tokens, std::vector<int64_t>& sentences);
    void run();

private:
    std::mutex mutex_;
    std::vector<int64_t> order_;
    size_t next_ = 0;
};

}  // namespace transduce
