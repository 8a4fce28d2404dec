// The inner loop of every matrix product: a few rows of x against a panel of columns.
//
// A panel holds PANEL columns side by side, all of their values along the product, zeros beyond the last column: bf16
// as [ceil(depth / 2)][PANEL][2], float32 as [depth][PANEL]. It is read from front to back. Each output is one chain
// of multiply-adds in the order of the depth, so a row's bits depend neither on the other rows nor on how many.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace loraplex {

constexpr int PANEL = TILE_COLUMNS * LANES;

template <class T> struct Packing;

template <> struct Packing<float> {
    static constexpr int DEPTH = 1;  // values in one step of a panel
    using Operand = Vec;
    static Operand load(const float* p) { return loraplex::load(p); }
    static Operand broadcast(const float* x) { return set1(*x); }
    static Operand broadcast_last(const float* x) { return set1(*x); }
    static Vec dot(Vec sum, Operand w, Operand x) { return fma(w, x, sum); }
};

template <> struct Packing<bf16> {
    static constexpr int DEPTH = 2;
    using Operand = Pair;
    static Operand load(const bf16* p) { return load_pairs(p); }
    static Operand broadcast(const bf16* x) { return broadcast_pair(x); }
    static Operand broadcast_last(const bf16* x) { return broadcast_pair(*x, bf16{0}); }
    static Vec dot(Vec sum, Operand w, Operand x) { return loraplex::dot(sum, w, x); }
};

template <class T> int64_t panel_size(int64_t depth) {
    constexpr int64_t step = Packing<T>::DEPTH;
    return (depth + step - 1) / step * step * PANEL;
}

template <int ROWS> using Sums = Vec[ROWS][TILE_COLUMNS];

// Calls `f(integral_constant<count>)`, 1 <= count <= LARGEST: the number of rows, known to the compiler.
template <int LARGEST, class F> inline void with_rows(int64_t count, const F& f) {
    if constexpr (LARGEST > 1) {
        if (count < LARGEST) return with_rows<LARGEST - 1>(count, f);
    }
    f(std::integral_constant<int, LARGEST>());
}

template <class T, int ROWS, class Broadcast>
inline __attribute__((always_inline)) void add_step(Sums<ROWS>& sums, const T* panel, const Broadcast& broadcast) {
    using P = Packing<T>;
    typename P::Operand w[TILE_COLUMNS];
#pragma GCC unroll 8
    for (int c = 0; c < TILE_COLUMNS; c++) w[c] = P::load(panel + c * LANES * P::DEPTH);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
        const auto value = broadcast(row);
#pragma GCC unroll 8
        for (int c = 0; c < TILE_COLUMNS; c++) sums[row][c] = P::dot(sums[row][c], w[c], value);
    }
}

// sums[row, column] += sum over the depth of x[row] * panel[column], the rows `x_stride` apart
template <class T, int ROWS>
inline __attribute__((always_inline)) void add_product(Sums<ROWS>& sums, const T* x, int64_t x_stride, const T* panel,
                                                       int64_t depth) {
    using P = Packing<T>;
    const int64_t whole = depth / P::DEPTH * P::DEPTH;
    for (int64_t k = 0; k < whole; k += P::DEPTH, panel += PANEL * P::DEPTH)
        add_step<T, ROWS>(sums, panel, [&](int row) { return P::broadcast(x + row * x_stride + k); });
    if (whole < depth)
        add_step<T, ROWS>(sums, panel, [&](int row) { return P::broadcast_last(x + row * x_stride + whole); });
}

}  // namespace loraplex
