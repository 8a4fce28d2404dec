// Attention of a few consecutive query tokens of one sequence, with an online softmax in float32.
//
// Keys come in tiles at fixed places of the sequence. A tile's scores are one product for all queries; a query then
// keeps those of the keys that it sees, and adds the values of these alone. So a row's bits do not depend on its
// neighbours, what is masked adds to nothing, and what is unwritten is not even read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "elementwise.h"
#include "key_tile.h"
#include "memory.h"
#include "simd.h"
#include "tile.h"

namespace loraplex {

constexpr int64_t QUERY_BLOCK = 16;
constexpr int64_t WORTH_WIDENING = 4;  // query tokens that share a tile's values

template <class T> struct AttentionInput {
    const T* query;  // [num_tokens, num_heads, head_dim], tokens `query_stride` apart
    int64_t query_stride;
    const T* key;    // [num_blocks, block_size, num_kv_heads, head_dim]
    const T* value;
    float scale;
    int64_t window;  // keys that a query sees, itself included; 0 = all
};

// Up to QUERY_BLOCK query tokens [first, last) of the batch, with the query heads of some key heads.
struct QueryItem {
    const int32_t* blocks;  // of the sequence
    int64_t position;       // of the first token in the sequence
    int64_t first;
    int64_t last;
    int64_t first_head;  // key heads
    int64_t num_heads;

    int64_t num_tokens() const { return last - first; }
    int64_t end() const { return position + num_tokens(); }
};

// A tile's values where the cache has them, which asks for those of a later tile on the way.
template <class T> struct CachedValues {
    const T* start;
    const KeyTile& tile;
    const Upcoming<T>& upcoming;

    const T* at(int key) const {
        upcoming.ask(key);
        return start + tile.offset[key];
    }
};

// A tile's values widened once for all queries of a block.
struct WidenedValues {
    const float* start;
    int64_t head_dim;

    const float* at(int key) const { return start + key * head_dim; }
};

// Softmax and weighted sum of one query head so far.
struct RowState {
    float maximum;
    float total;
};

// The tiles that an item reads, in order, and then the first one of the item after it.
class TileWalk {
public:
    TileWalk(const HeadShape& shape, int64_t window) : shape_(shape), window_(window) {}

    // The first key that the query at `position` sees.
    int64_t first_key(int64_t position) const {
        return window_ == 0 ? 0 : std::max(position + 1 - window_, int64_t{0});
    }

    int64_t first_start(const QueryItem& item) const { return first_key(item.position) / KEY_TILE * KEY_TILE; }

    KeyTile tile(const QueryItem& item, int64_t start) const {
        return KeyTile(item.blocks, shape_, start, first_key(item.position), item.end());
    }

    KeyTile after(const QueryItem& item, int64_t start, const QueryItem* next) const {
        if (start + KEY_TILE < item.end()) return tile(item, start + KEY_TILE);
        return next == nullptr ? KeyTile() : tile(*next, first_start(*next));
    }

private:
    const HeadShape& shape_;
    const int64_t window_;
};

template <class T> class QueryBlock {
public:
    QueryBlock(const HeadShape& shape, const AttentionInput<T>& input, int64_t max_heads)
        : shape_(shape),
          input_(input),
          walk_(shape_, input.window),
          states_(QUERY_BLOCK * max_heads * shape.group_size()),
          sums_(QUERY_BLOCK * max_heads * shape.group_size() * shape.head_dim),
          queries_(QUERY_BLOCK * max_heads * shape.group_size() * shape.head_dim),
          scores_(QUERY_BLOCK * shape.group_size() * KEY_TILE),
          keys_(KEY_TILE / PANEL * panel_size<T>(shape.head_dim)),
          widened_(KEY_TILE * shape.head_dim) {}

    // `next`: what this thread attends with afterwards, most likely, or null; its first tile is asked for on the way.
    void run(const QueryItem& item, const QueryItem* next, T* output, int64_t output_stride) {
        start(item);
        KeyTile tile = walk_.tile(item, walk_.first_start(item));
        for (int64_t start = walk_.first_start(item); start < item.end(); start += KEY_TILE) {
            const KeyTile upcoming = walk_.after(item, start, next);
            for (int64_t head = 0; head < item.num_heads; head++) attend_tile(item, tile, start, head, upcoming);
            tile = upcoming;
        }
        finish(item, output, output_stride);
    }

private:
    int64_t group() const { return shape_.group_size(); }

    // Rows: the query heads of one key head, token after token; then those of the next key head.
    int64_t first_row(const QueryItem& item, int64_t head) const { return head * item.num_tokens() * group(); }

    void start(const QueryItem& item) {
        const int64_t num_rows = item.num_heads * item.num_tokens() * group();
        std::fill_n(states_.at(0), num_rows, RowState{-INFINITY, 0.0f});
        std::fill_n(sums_.at(0), num_rows * shape_.head_dim, 0.0f);
        const int64_t size = group() * shape_.head_dim;
        for (int64_t head = 0; head < item.num_heads; head++)
            for (int64_t token = 0; token < item.num_tokens(); token++)
                std::copy_n(input_.query + (item.first + token) * input_.query_stride + (item.first_head + head) * size,
                            size, queries_.at((first_row(item, head) + token * group()) * shape_.head_dim));
    }

    void attend_tile(const QueryItem& item, const KeyTile& tile, int64_t start, int64_t head, const KeyTile& later) {
        const int64_t offset = (item.first_head + head) * shape_.head_dim;
        const T *key = input_.key + offset, *value = input_.value + offset;
        const Upcoming<T> upcoming_keys(key, shape_.head_dim, tile, later);
        const Upcoming<T> upcoming_values(value, shape_.head_dim, tile, later);
        pack_keys(key, tile, shape_.head_dim, upcoming_keys, keys_.at(0));
        const int64_t row = first_row(item, head);
        for (int panel = tile.from / PANEL; panel * PANEL < tile.to; panel++)
            score(row, item.num_tokens() * group(), panel);
        const CachedValues<T> cached{value, tile, upcoming_values};
        if (item.num_tokens() < WORTH_WIDENING) {
            add_tokens(item, start, row, cached);
        } else {
            widen(cached);
            add_tokens(item, start, row, WidenedValues{widened_.at(0), shape_.head_dim});
        }
    }

    // Each query token with what it sees of the tile at position `start`.
    template <class Values>
    void add_tokens(const QueryItem& item, int64_t start, int64_t first_row, const Values& values) {
        for (int64_t token = 0; token < item.num_tokens(); token++) {
            const int64_t own = item.position + token, place = token * group();
            const int from = static_cast<int>(std::max(walk_.first_key(own) - start, int64_t{0}));
            const int to = static_cast<int>(std::min(own + 1 - start, int64_t{KEY_TILE}));
            if (from >= to) continue;
            for (int64_t i = place; i < place + group(); i++)
                reweigh(first_row + i, from, to, scores_.at(i * KEY_TILE));
            add_values(values, first_row, place, from, to);
        }
    }

    void score(int64_t first_row, int64_t num_rows, int panel) {
        const T* keys = keys_.at(panel * panel_size<T>(shape_.head_dim));
        for (int64_t row = 0; row < num_rows; row += TILE_ROWS)
            with_rows<TILE_ROWS>(std::min<int64_t>(TILE_ROWS, num_rows - row), [&](auto rows) {
                score_rows<rows>(queries_.at((first_row + row) * shape_.head_dim), keys,
                                 scores_.at(row * KEY_TILE + panel * PANEL));
            });
    }

    template <int ROWS> void score_rows(const T* queries, const T* keys, float* scores) const {
        Sums<ROWS> sums;
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < TILE_COLUMNS; c++) sums[row][c] = zero();
        add_product<T, ROWS>(sums, queries, shape_.head_dim, keys, shape_.head_dim);
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < TILE_COLUMNS; c++)
                store(scores + row * KEY_TILE + c * LANES, sums[row][c] * set1(input_.scale));
    }

    void widen(const CachedValues<T>& values) {
        for (int key = values.tile.from; key < values.tile.to; key++) {
            const T* value = values.at(key);
            for_each_vector(shape_.head_dim, [&](int64_t i, auto n) {
                store_n(widened_.at(key * shape_.head_dim + i), load_n(value + i, n), n);
            });
        }
    }

    // Scores become weights e^(score - maximum), 0 outside [from, to); what was summed before follows the maximum.
    void reweigh(int64_t row, int from, int to, float* weights) {
        const int begin = from / LANES * LANES, end = (to + LANES - 1) / LANES * LANES;
        std::fill(weights + begin, weights + from, -INFINITY);
        std::fill(weights + to, weights + end, -INFINITY);
        RowState& state = *states_.at(row);
        Vec highest = set1(state.maximum);
        for (int i = begin; i < end; i += LANES) highest = maximum(load(weights + i), highest);
        const float top = largest(highest);
        Vec total = zero();
        for (int i = begin; i < end; i += LANES) {
            const Vec weight = exp(load(weights + i) - set1(top));
            store(weights + i, weight);
            total = total + weight;
        }
        const float decay = state.maximum == top ? 1.0f : std::exp(state.maximum - top);
        state = {top, state.total * decay + sum(total)};
        if (decay != 1.0f) {
            float* sums = sums_.at(row * shape_.head_dim);
            for_each_vector(shape_.head_dim,
                            [&](int64_t i, auto n) { store_n(sums + i, load_n(sums + i, n) * set1(decay), n); });
        }
    }

    // sums[row] += sum over the keys of weights[row, key] * value[key], for the rows of one query token
    template <class Values>
    void add_values(const Values& values, int64_t first_row, int64_t place, int from, int to) {
        for (int64_t i = place; i < place + group(); i += VALUE_ROWS)
            with_rows<VALUE_ROWS>(std::min<int64_t>(VALUE_ROWS, place + group() - i), [&](auto rows) {
                add_rows<rows>(values, from, to, scores_.at(i * KEY_TILE), sums_.at((first_row + i) * shape_.head_dim));
            });
    }

    template <int ROWS, class Values>
    void add_rows(const Values& values, int from, int to, const float* weights, float* sums) const {
        int64_t d = 0;
        for (; d + 4 * LANES <= shape_.head_dim; d += 4 * LANES)
            add_columns<ROWS, 4>(values, from, to, weights, sums + d, d, Whole());
        for (; d + LANES <= shape_.head_dim; d += LANES)
            add_columns<ROWS, 1>(values, from, to, weights, sums + d, d, Whole());
        if (d < shape_.head_dim)
            add_columns<ROWS, 1>(values, from, to, weights, sums + d, d, static_cast<int>(shape_.head_dim - d));
    }

    // COLUMNS vectors of `n` lanes, all of them or one vector with fewer.
    template <int ROWS, int COLUMNS, class Values, class Count>
    void add_columns(const Values& values, int from, int to, const float* weights, float* sums, int64_t d,
                     Count n) const {
        Vec acc[ROWS][COLUMNS];
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < COLUMNS; c++) acc[row][c] = load_n(sums + row * shape_.head_dim + c * LANES, n);
        for (int key = from; key < to; key++) {
            const auto* value = values.at(key) + d;
            Vec columns[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) columns[c] = load_n(value + c * LANES, n);
            for (int row = 0; row < ROWS; row++) {
                const Vec weight = set1(weights[row * KEY_TILE + key]);
                for (int c = 0; c < COLUMNS; c++) acc[row][c] = fma(weight, columns[c], acc[row][c]);
            }
        }
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < COLUMNS; c++) store_n(sums + row * shape_.head_dim + c * LANES, acc[row][c], n);
    }

    void finish(const QueryItem& item, T* output, int64_t output_stride) const {
        for (int64_t head = 0; head < item.num_heads; head++)
            for (int64_t token = 0; token < item.num_tokens(); token++)
                for (int64_t i = 0; i < group(); i++)
                    finish_row(first_row(item, head) + token * group() + i,
                               output + (item.first + token) * output_stride +
                                   ((item.first_head + head) * group() + i) * shape_.head_dim);
    }

    void finish_row(int64_t row, T* output) const {
        const float* sums = sums_.at(row * shape_.head_dim);
        const Vec factor = set1(1.0f / states_.at(row)->total);
        for_each_vector(shape_.head_dim,
                        [&](int64_t i, auto n) { store_n(output + i, load_n(sums + i, n) * factor, n); });
    }

    const HeadShape shape_;
    const AttentionInput<T> input_;
    const TileWalk walk_;
    Scratch<RowState> states_;  // one for each row
    Scratch<float> sums_;       // [rows, head_dim]
    Scratch<T> queries_;        // [rows, head_dim]
    Scratch<float> scores_;     // [rows of one key head, KEY_TILE], then weights
    Scratch<T> keys_;           // panels of one key head
    Scratch<float> widened_;    // [KEY_TILE, head_dim]
};

}  // namespace loraplex
