// y = x W^T + b on weights packed once into panels.
//
// A panel holds PANEL output columns, all of K, zeros beyond the last column: bf16 as [ceil(K / 2)][PANEL][2], float32
// as [K][PANEL]. It is read once from front to back. Each output is one chain of multiply-adds in the order of K, so
// a row's bits depend neither on the other rows nor on how many there are.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "simd.h"
#include "team.h"

namespace loraplex {

constexpr int PANEL = 2 * LANES;
constexpr int64_t ROW_BLOCK = 8 * TILE_ROWS;  // rows of one work item

struct Linear {
    const void* panels;
    const void* bias;  // of the activations' type, or null
    int64_t in_features;
    int64_t out_features;
};

template <class T> struct Packing;

template <> struct Packing<float> {
    static constexpr int DEPTH = 1;  // values of K in one row of a panel
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

template <class T> int64_t panel_size(int64_t in_features) {
    constexpr int64_t depth = Packing<T>::DEPTH;
    return (in_features + depth - 1) / depth * depth * PANEL;
}

inline int64_t num_panels(int64_t out_features) { return (out_features + PANEL - 1) / PANEL; }

// `weight [out, in]` -> panels
template <class T> void pack(Team& team, const T* weight, T* panels, int64_t out_features, int64_t in_features) {
    constexpr int depth = Packing<T>::DEPTH;
    const int64_t size = panel_size<T>(in_features);
    for (int64_t panel = team.claim(); panel < num_panels(out_features); panel = team.claim()) {
        T* target = panels + panel * size;
        const int64_t num_columns = std::min<int64_t>(PANEL, out_features - panel * PANEL);
        std::fill(target, target + size, from_float<T>(0));
        for (int64_t column = 0; column < num_columns; column++) {
            const T* source = weight + (panel * PANEL + column) * in_features;
            for (int64_t k = 0; k < in_features; k++)
                target[(k / depth * PANEL + column) * depth + k % depth] = source[k];
        }
    }
}

template <class T> void store_columns(T* y, Vec low, Vec high, const T* bias, int num_columns) {
    const int in_low = std::min(num_columns, LANES), in_high = num_columns - in_low;
    if (bias != nullptr) {
        low = low + load_partial(bias, in_low);
        if (in_high > 0) high = high + load_partial(bias + LANES, in_high);
    }
    if (num_columns == PANEL) {
        store(y, low);
        store(y + LANES, high);
        return;
    }
    store_partial(y, low, in_low);
    if (in_high > 0) store_partial(y + LANES, high, in_high);
}

template <class T, int ROWS>
void multiply_tile(const T* x, int64_t x_stride, const T* panel, const T* bias, int64_t in_features, T* y,
                   int64_t y_stride, int num_columns) {
    using P = Packing<T>;
    Vec low[ROWS], high[ROWS];
    for (int row = 0; row < ROWS; row++) low[row] = high[row] = zero();
    const int64_t end = in_features / P::DEPTH * P::DEPTH;
    for (int64_t k = 0; k < end; k += P::DEPTH, panel += PANEL * P::DEPTH) {
        const auto w_low = P::load(panel), w_high = P::load(panel + LANES * P::DEPTH);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            const auto value = P::broadcast(x + row * x_stride + k);
            low[row] = P::dot(low[row], w_low, value);
            high[row] = P::dot(high[row], w_high, value);
        }
    }
    if (end < in_features) {
        const auto w_low = P::load(panel), w_high = P::load(panel + LANES * P::DEPTH);
        for (int row = 0; row < ROWS; row++) {
            const auto value = P::broadcast_last(x + row * x_stride + end);
            low[row] = P::dot(low[row], w_low, value);
            high[row] = P::dot(high[row], w_high, value);
        }
    }
    for (int row = 0; row < ROWS; row++) store_columns(y + row * y_stride, low[row], high[row], bias, num_columns);
}

template <class T>
using TileFunction = void (*)(const T*, int64_t, const T*, const T*, int64_t, T*, int64_t, int);

template <class T, int... COUNT>
constexpr std::array<TileFunction<T>, sizeof...(COUNT)> tile_functions(std::integer_sequence<int, COUNT...>) {
    return {&multiply_tile<T, COUNT + 1>...};
}

// y [num_rows, out], rows `y_stride` apart. One phase of the team, without the barrier at its end.
template <class T>
void multiply(Team& team, const T* x, int64_t x_stride, const Linear& linear, T* y, int64_t y_stride,
              int64_t num_rows) {
    static constexpr auto functions = tile_functions<T>(std::make_integer_sequence<int, TILE_ROWS>());
    const int64_t size = panel_size<T>(linear.in_features);
    const int64_t num_blocks = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t num_items = num_panels(linear.out_features) * num_blocks;
    for (int64_t item = team.claim(); item < num_items; item = team.claim()) {
        const int64_t panel = item / num_blocks, column = panel * PANEL;
        const int num_columns = static_cast<int>(std::min<int64_t>(PANEL, linear.out_features - column));
        const T* bias = linear.bias == nullptr ? nullptr : static_cast<const T*>(linear.bias) + column;
        const int64_t start = item % num_blocks * ROW_BLOCK, end = std::min(start + ROW_BLOCK, num_rows);
        for (int64_t row = start, count; row < end; row += count) {
            const int64_t num_tiles = (end - row + TILE_ROWS - 1) / TILE_ROWS;  // of about equal size
            count = (end - row + num_tiles - 1) / num_tiles;
            functions[count - 1](x + row * x_stride, x_stride, static_cast<const T*>(linear.panels) + panel * size,
                                 bias, linear.in_features, y + row * y_stride + column, y_stride, num_columns);
        }
    }
}

}  // namespace loraplex
