// The memory limit of Adam: trivial arithmetic over the same streams, three fp32 arrays read and written in place, one
// gradient read and one bf16 weight written. Built by benchmarks/adam.py.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

inline float widen(float x) { return x; }

inline float widen(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class Gradient>
void part(float *__restrict p, float *__restrict m, float *__restrict v, const Gradient *__restrict g,
          uint16_t *__restrict w, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const float x = widen(g[i]);
        p[i] = p[i] * 0.999f + x;
        m[i] = m[i] * 0.999f + x;
        v[i] = v[i] * 0.999f + 1e-6f;
        uint32_t bits;
        std::memcpy(&bits, p + i, sizeof bits);
        w[i] = static_cast<uint16_t>(bits >> 16);
    }
}

template <class Gradient>
void all(float *p, float *m, float *v, const Gradient *g, uint16_t *w, int64_t numel, int threads) {
    std::vector<std::thread> team;
    const auto edge = [&](int k) { return numel * k / threads; };
    for (int k = 1; k < threads; ++k)
        team.emplace_back(part<Gradient>, p, m, v, g, w, edge(k), edge(k + 1));
    part<Gradient>(p, m, v, g, w, 0, edge(1));
    for (auto &thread : team)
        thread.join();
}

}  // namespace

extern "C" void streams(float *p, float *m, float *v, const void *g, int bf16_gradient, uint16_t *w, int64_t numel,
                        int threads) {
    if (bf16_gradient)
        all(p, m, v, static_cast<const uint16_t *>(g), w, numel, threads);
    else
        all(p, m, v, static_cast<const float *>(g), w, numel, threads);
}
