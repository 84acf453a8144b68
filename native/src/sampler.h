// Draws a token from a row of logits, by the rules of transduce/decoding/sampling.py.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"

namespace transduce {

// Sampling options. Logits are divided by `temperature`; then only the `top_k` most likely tokens are kept, and of these the most likely
// tokens whose probabilities sum to `top_p`. A temperature of 0 takes the most likely token; `top_k` 0 and `top_p` 1 keep all tokens.
struct Sampling {
    float temperature = 1;
    int top_k = 0;
    double top_p = 1;
};

class Sampler {
public:
    explicit Sampler(const Kernels& kernels) : kernels_(kernels) {}

    // Draws a token; returns -1 if a logit is NaN. The first `n` of the `columns` logits belong to tokens; other columns and `banned` tokens are
    // never drawn. `raised`: tokens, each with a minimum to which its logit is raised. `number`: a random number in [0, 1). `log_prob` receives
    // the token's log-probability under the unchanged logits. Changes `logits`.
    int32_t draw(float* logits, int n, int columns, const std::vector<int32_t>& banned, const std::vector<std::pair<int32_t, float>>& raised,
                 const Sampling& sampling, double number, float& log_prob);

private:
    struct Token {
        float logit, weight;
        int32_t id;
    };

    int32_t draw_from_all(int n, double number) const;
    void take_at_least(const float* logits, int n, float least);
    void take_top_k(const float* logits, int n, int k);
    void take_top_p(const float* logits, int n, bool taken, const Sampling& sampling);
    int32_t draw_from_taken(double number) const;

    const Kernels& kernels_;
    std::vector<float> maxima_, weights_, sums_, order_, own_;  // own_: logits of raised tokens before they are raised
    std::vector<Token> taken_, sorted_;  // taken_: in the order of ids
};

}  // namespace transduce
