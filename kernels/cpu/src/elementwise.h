// Norms, rotary embedding, gated activation. Row by row, float32 inside, rounded where the model rounds.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "team.h"

namespace loraplex {

constexpr int64_t ROWS_PER_CLAIM = 8;

// Calls `f(row)` for every row, as one phase of the team without the barrier at its end.
template <class F> void for_each_row(Team& team, int64_t num_rows, const F& f) {
    for (int64_t first = team.claim() * ROWS_PER_CLAIM; first < num_rows; first = team.claim() * ROWS_PER_CLAIM)
        for (int64_t row = first; row < std::min(first + ROWS_PER_CLAIM, num_rows); row++) f(row);
}

// The number of lanes of a whole vector, known to the compiler.
struct Whole {
    constexpr operator int() const { return LANES; }
};

// Calls `f(start, n)` for whole vectors, and once with n < LANES for the rest.
template <class F> inline void for_each_vector(int64_t size, const F& f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) f(i, Whole());
    if (i < size) f(i, static_cast<int>(size - i));
}

template <class T> inline Vec load_n(const T* p, Whole) { return load(p); }
template <class T> inline void store_n(T* p, Vec x, Whole) { store(p, x); }
template <class T> inline Vec load_n(const T* p, int n) { return n == LANES ? load(p) : load_partial(p, n); }

template <class T> inline void store_n(T* p, Vec x, int n) { n == LANES ? store(p, x) : store_partial(p, x, n); }

inline Vec rounded_to(const float*, Vec x) { return x; }

inline Vec rounded_to(const bf16*, Vec x) {
    bf16 copy[LANES];
    store(copy, x);
    return load(copy);
}

// output = round(x / rms(x)) * weight; `output` may be `x`.
template <class T> void rms_norm_row(const T* x, const T* weight, float eps, int64_t size, T* output) {
    Vec squares = zero();
    for_each_vector(size, [&](int64_t i, auto n) {
        const Vec value = load_n(x + i, n);
        squares = fma(value, value, squares);
    });
    const Vec scale = set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    for_each_vector(size, [&](int64_t i, auto n) {
        const Vec normed = rounded_to(x, load_n(x + i, n) * scale);
        store_n(output + i, normed * load_n(weight + i, n), n);
    });
}

// total = x + residual; `total` may be either.
template <class T> void add_row(const T* x, const T* residual, int64_t size, T* total) {
    for_each_vector(size, [&](int64_t i, auto n) {
        store_n(total + i, load_n(x + i, n) + load_n(residual + i, n), n);
    });
}

// Turns the halves of one head in place; `cosine, sine [head_dim]`.
template <class T> void rotate_head(T* head, const T* cosine, const T* sine, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for_each_vector(half, [&](int64_t i, auto n) {
        const Vec first = load_n(head + i, n), second = load_n(head + half + i, n);
        const Vec turned_first = first * load_n(cosine + i, n) - second * load_n(sine + i, n);
        const Vec turned_second = second * load_n(cosine + half + i, n) + first * load_n(sine + half + i, n);
        store_n(head + i, turned_first, n);
        store_n(head + half + i, turned_second, n);
    });
}

// gate / (1 + e^-gate) * up, with exponents of negative numbers only, so that nothing overflows.
inline Vec silu_times(Vec gate, Vec up) {
    const Vec magnitude = maximum(zero() - gate, gate);
    const Vec decay = exp(zero() - magnitude);
    const Vec numerator = zero_below(gate, zero(), set1(1.0f) - decay) + decay;  // 1, or e^gate below 0
    return gate * (numerator / (set1(1.0f) + decay)) * up;
}

// `gate_up [2 * size]` -> output [size]
template <class T> void silu_and_mul_row(const T* gate_up, int64_t size, T* output) {
    for_each_vector(size, [&](int64_t i, auto n) {
        store_n(output + i, silu_times(load_n(gate_up + i, n), load_n(gate_up + size + i, n)), n);
    });
}

}  // namespace loraplex
