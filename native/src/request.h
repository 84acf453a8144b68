// A sentence to translate, and the outcomes that it can have.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "sampler.h"
#include "search.h"

namespace transduce {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

struct Client;

// The kinds of events of a sentence. All kinds but `tokens` end it.
enum class Outcome : int32_t { done, tokens, cancelled, failed };

struct Request {
    std::vector<int32_t> ids, prefix;
    int n_unscored = 0;    // number of first tokens of the prefix whose log-probabilities do not count
    Spelling spelling;    // the tokens that may follow the prefix
    uint64_t copies = 0;  // see transduce_sentences
    SearchOptions options;
    int limit = 1;
    Sampling sampling;
    std::vector<double> numbers;  // sampling: `limit` random numbers for each sample
    bool stream = false;  // whether tokens are reported as soon as they are certain
    int64_t ticket = 0;   // the client's number for this sentence

    // Members of the queue, read and written under its lock.
    Client* client = nullptr;
    double order = 0;                    // sentences with smaller numbers are decoded first
    int64_t submission = 0, number = 0;  // numbers in the order of arrival: of the call of `submit`, and of the sentence
    bool waiting = true, ended = false;
};

}  // namespace transduce
