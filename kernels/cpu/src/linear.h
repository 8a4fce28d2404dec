// y = x W^T + b on weights packed once into panels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elementwise.h"
#include "simd.h"
#include "team.h"
#include "tile.h"

namespace loraplex {

constexpr int64_t ROW_BLOCK = 12 * TILE_ROWS;  // rows of one work item, at most
constexpr int64_t DEPTH_BLOCK = 2048;          // that many values of a row block and of a panel stay in the L2 cache
static_assert(DEPTH_BLOCK % 2 == 0, "a block begins where a step of a panel does");

struct Linear {
    const void* panels;
    const void* bias;  // of the activations' type, or null
    int64_t in_features;
    int64_t out_features;
};

inline int64_t num_panels(int64_t out_features) { return (out_features + PANEL - 1) / PANEL; }

// The place of a weight's value in its panel.
template <class T> int64_t place_in_panel(int64_t column, int64_t k) {
    constexpr int64_t depth = Packing<T>::DEPTH;
    return (k / depth * PANEL + column) * depth + k % depth;
}

// `weight [out, in]` -> panels
template <class T> void pack(Team& team, const T* weight, T* panels, int64_t out_features, int64_t in_features) {
    const int64_t size = panel_size<T>(in_features);
    for (int64_t panel = team.claim(); panel < num_panels(out_features); panel = team.claim()) {
        T* target = panels + panel * size;
        const int64_t num_columns = std::min<int64_t>(PANEL, out_features - panel * PANEL);
        std::fill(target, target + size, from_float<T>(0));
        for (int64_t column = 0; column < num_columns; column++) {
            const T* source = weight + (panel * PANEL + column) * in_features;
            for (int64_t k = 0; k < in_features; k++) target[place_in_panel<T>(column, k)] = source[k];
        }
    }
}

// Row `id` of the weight as it was before it was packed.
template <class T> void unpack_row(const Linear& linear, int64_t id, T* row) {
    const T* panel = static_cast<const T*>(linear.panels) + id / PANEL * panel_size<T>(linear.in_features);
    for (int64_t k = 0; k < linear.in_features; k++) row[k] = panel[place_in_panel<T>(id % PANEL, k)];
}

// One work item: a block of rows times one panel. The depth goes in blocks, with the sums kept between them.
template <class T> class PanelProduct {
public:
    PanelProduct(const T* x, int64_t x_stride, int64_t num_rows, const Linear& linear)
        : x_(x), x_stride_(x_stride), num_rows_(num_rows), linear_(linear) {}

    void run(int64_t panel, T* y, int64_t y_stride) {
        const T* weights = static_cast<const T*>(linear_.panels) + panel * panel_size<T>(linear_.in_features);
        for (int64_t k = 0; k < linear_.in_features; k += DEPTH_BLOCK)
            add_depth(weights + panel_size<T>(k), k, std::min(DEPTH_BLOCK, linear_.in_features - k));
        store_rows(panel * PANEL, y, y_stride);
    }

private:
    // In tiles of about equal size.
    void add_depth(const T* weights, int64_t k, int64_t depth) {
        const int64_t num_tiles = (num_rows_ + TILE_ROWS - 1) / TILE_ROWS;
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            const int64_t row = num_rows_ * tile / num_tiles, end = num_rows_ * (tile + 1) / num_tiles;
            with_rows<TILE_ROWS>(end - row, [&](auto rows) {
                add_tile<rows>(x_ + row * x_stride_ + k, weights, depth, sums_ + row, k == 0);
            });
        }
    }

    template <int ROWS>
    void add_tile(const T* x, const T* weights, int64_t depth, float (*kept)[PANEL], bool is_first) {
        Sums<ROWS> sums;
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < TILE_COLUMNS; c++) sums[row][c] = is_first ? zero() : load(kept[row] + c * LANES);
        add_product<T, ROWS>(sums, x, x_stride_, weights, depth);
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < TILE_COLUMNS; c++) store(kept[row] + c * LANES, sums[row][c]);
    }

    void store_rows(int64_t column, T* y, int64_t y_stride) const {
        const T* bias = linear_.bias == nullptr ? nullptr : static_cast<const T*>(linear_.bias) + column;
        const int64_t num_columns = std::min<int64_t>(PANEL, linear_.out_features - column);
        for (int64_t row = 0; row < num_rows_; row++)
            for_each_vector(num_columns, [&](int64_t i, auto n) {
                const Vec sum = load(sums_[row] + i);
                store_n(y + row * y_stride + column + i, bias == nullptr ? sum : sum + load_n(bias + i, n), n);
            });
    }

    const T* x_;
    const int64_t x_stride_;
    const int64_t num_rows_;
    const Linear& linear_;
    alignas(64) float sums_[ROW_BLOCK][PANEL];
};

// y [num_rows, out], rows `y_stride` apart. One phase of the team, without the barrier at its end.
//
// All panels with one block of rows, then with the next: the rows stay in the cache, the panels pass by.
template <class T>
void multiply(Team& team, const T* x, int64_t x_stride, const Linear& linear, T* y, int64_t y_stride,
              int64_t num_rows) {
    const int64_t panels = num_panels(linear.out_features);
    const int64_t num_blocks = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    for (int64_t item = team.claim(); item < panels * num_blocks; item = team.claim()) {
        const int64_t block = item / panels;
        const int64_t row = num_rows * block / num_blocks, end = num_rows * (block + 1) / num_blocks;
        PanelProduct<T>(x + row * x_stride, x_stride, end - row, linear)
            .run(item % panels, y + row * y_stride, y_stride);
    }
}

}  // namespace loraplex
