// The recurrent unit of a decoder (SSRU, Kim et al. 2019). Included by target_*.cpp after layers.inl.

namespace {

void recur(const float* gate_value, float* state, int width, float* x) {
    const float* value = gate_value + width;
    for (int i = 0; i < width; i += W) {
        const Vec v = load(value + i), c = fma(sigmoid(load(gate_value + i)), load(state + i) - v, v);
        store(state + i, c);
        store(x + i, load(x + i) + max(c, zero()));
    }
}

}  // namespace
