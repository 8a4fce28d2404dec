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
#include "value_tile.h"

namespace loraplex {

constexpr int64_t QUERY_BLOCK = 32;
constexpr int64_t WORTH_PACKING = 4;  // query tokens that share a tile's values

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
          stripes_(num_stripes<T>(shape.head_dim)),
          sums_(QUERY_BLOCK * max_heads * shape.group_size() * sums_size()),
          queries_(QUERY_BLOCK * max_heads * shape.group_size() * shape.head_dim),
          scores_(QUERY_BLOCK * shape.group_size() * KEY_TILE),
          keys_(KEY_TILE / PANEL * panel_size<T>(shape.head_dim)),
          weights_(QUERY_BLOCK * shape.group_size() * KEY_TILE),
          values_(KEY_TILE / W::KEYS * stripes_ * W::VECTORS),
          zeros_(shape.head_dim) {
        std::fill_n(zeros_.at(0), shape.head_dim, T{});
    }

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
    using W = Weighing<T>;
    using Weight = typename W::Weight;

    int64_t group() const { return shape_.group_size(); }
    int64_t sums_size() const { return stripes_ * W::WIDTH; }

    // Rows: the query heads of one key head, token after token; then those of the next key head.
    int64_t first_row(const QueryItem& item, int64_t head) const { return head * item.num_tokens() * group(); }

    void start(const QueryItem& item) {
        const int64_t num_rows = item.num_heads * item.num_tokens() * group();
        std::fill_n(states_.at(0), num_rows, RowState{-INFINITY, 0.0f});
        std::fill_n(sums_.at(0), num_rows * sums_size(), 0.0f);
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
        const CachedValues<T> cached{value,           zeros_.at(0), shape_.head_dim, tile,
                                     upcoming_values, tile.from,    tile.to};
        add_values(item, start, row, cached);
    }

    // What the query token at `position` sees of a tile; perhaps nothing.
    CachedValues<T> seen(CachedValues<T> values, int64_t start, int64_t position) const {
        values.from = static_cast<int>(std::clamp(walk_.first_key(position) - start, int64_t{0}, int64_t{KEY_TILE}));
        values.to = static_cast<int>(std::clamp(position + 1 - start, int64_t{values.from}, int64_t{KEY_TILE}));
        return values;
    }

    void add_values(const QueryItem& item, int64_t start, int64_t row, const CachedValues<T>& cached) {
        if (item.num_tokens() >= WORTH_PACKING) return add_packed(item, start, row, cached);
        for (int64_t token = 0; token < item.num_tokens(); token++) {
            const CachedValues<T> own = seen(cached, start, item.position + token);
            reweigh_token(own, row, token);
            add(own, row, token * group(), group(), own.first_step(), own.last_step());
        }
    }

    // Steps that all tokens see whole are one product for all rows, those before and after it one for each token: a row
    // adds its steps in their order.
    void add_packed(const QueryItem& item, int64_t start, int64_t row, const CachedValues<T>& cached) {
        const PackedValues<T> packed{values_.at(0), stripes_};
        packed.pack(cached);
        int first = (seen(cached, start, item.end() - 1).from + W::KEYS - 1) / W::KEYS;
        int last = seen(cached, start, item.position).to / W::KEYS;
        if (first >= last) first = last = KEY_TILE / W::KEYS;
        for (int64_t token = 0; token < item.num_tokens(); token++) {
            const CachedValues<T> own = seen(cached, start, item.position + token);
            reweigh_token(own, row, token);
            const int end = std::min(own.last_step(), first);
            add(SeenValues<T>{packed, own}, row, token * group(), group(), own.first_step(), end);
        }
        add(packed, row, 0, item.num_tokens() * group(), first, last);
        for (int64_t token = 0; token < item.num_tokens(); token++) {
            const CachedValues<T> own = seen(cached, start, item.position + token);
            add(SeenValues<T>{packed, own}, row, token * group(), group(), last, own.last_step());
        }
    }

    void reweigh_token(const CachedValues<T>& own, int64_t first_row, int64_t token) {
        if (own.from >= own.to) return;
        for (int64_t i = token * group(); i < (token + 1) * group(); i++) reweigh(first_row + i, i, own.from, own.to);
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

    // Scores become weights e^(score - maximum), 0 outside [from, to); what was summed before follows the maximum.
    // The total is that of the weights as they are multiplied: their rounding then cancels where values are alike.
    void reweigh(int64_t row, int64_t place, int from, int to) {
        const int begin = from / LANES * LANES, end = (to + LANES - 1) / LANES * LANES;
        float* scores = scores_.at(place * KEY_TILE);
        std::fill(scores + begin, scores + from, -INFINITY);
        std::fill(scores + to, scores + end, -INFINITY);
        RowState& state = *states_.at(row);
        Vec highest = set1(state.maximum);
        for (int i = begin; i < end; i += LANES) highest = maximum(load(scores + i), highest);
        const float top = largest(highest);
        Weight* weights = weights_.at(place * KEY_TILE);
        Vec total = zero();
        for (int i = begin; i < end; i += LANES) {
            store(weights + i, W::exp(load(scores + i) - set1(top)));
            total = total + load(weights + i);
        }
        const float decay = state.maximum == top ? 1.0f : std::exp(state.maximum - top);
        state = {top, state.total * decay + sum(total)};
        if (decay != 1.0f) {
            float* sums = sums_.at(row * sums_size());
            for (int64_t i = 0; i < sums_size(); i += LANES) store(sums + i, load(sums + i) * set1(decay));
        }
    }

    // sums[row] += sum over the keys of some steps of weights[row, key] * value[key], for `count` rows from `place` on
    template <class Values>
    void add(const Values& values, int64_t first_row, int64_t place, int64_t count, int first_step, int last_step) {
        if (first_step >= last_step) return;
        for (int64_t i = place; i < place + count; i += VALUE_ROWS)
            with_rows<VALUE_ROWS>(std::min<int64_t>(VALUE_ROWS, place + count - i), [&](auto rows) {
                add_rows<rows>(values, first_step, last_step, weights_.at(i * KEY_TILE),
                               sums_.at((first_row + i) * sums_size()));
            });
    }

    template <int ROWS, class Values>
    void add_rows(const Values& values, int first_step, int last_step, const Weight* weights, float* sums) const {
        constexpr int wide = 4 / W::VECTORS;
        const int64_t whole = shape_.head_dim / W::WIDTH;
        int64_t stripe = 0;
        for (; stripe + wide <= whole; stripe += wide)
            add_stripes<ROWS, wide, true>(values, first_step, last_step, weights, sums, stripe);
        for (; stripe < whole; stripe++)
            add_stripes<ROWS, 1, true>(values, first_step, last_step, weights, sums, stripe);
        if (stripe < stripes_) add_stripes<ROWS, 1, false>(values, first_step, last_step, weights, sums, stripe);
    }

    template <int ROWS, int STRIPES, bool ARE_WHOLE, class Values>
    void add_stripes(const Values& values, int first_step, int last_step, const Weight* weights, float* sums,
                     int64_t stripe) const {
        constexpr int columns = STRIPES * W::VECTORS;
        float* start = sums + stripe * W::WIDTH;
        Vec acc[ROWS][columns];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) acc[row][c] = load(start + row * sums_size() + c * LANES);
        for (int step = first_step; step < last_step; step++) {
            typename W::Operand operands[columns];
            values.template load<STRIPES, ARE_WHOLE>(step, stripe, operands);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const auto weight = W::broadcast(weights + row * KEY_TILE + step * W::KEYS);
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++) acc[row][c] = W::dot(acc[row][c], operands[c], weight);
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) store(start + row * sums_size() + c * LANES, acc[row][c]);
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
        const float* sums = sums_.at(row * sums_size());
        const Vec factor = set1(1.0f / states_.at(row)->total);
        for (int64_t d = 0; d < shape_.head_dim; d += W::WIDTH) {
            Vec stripe[W::VECTORS];
            for (int i = 0; i < W::VECTORS; i++) stripe[i] = load(sums + d + i * LANES) * factor;
            W::store(output + d, stripe, std::min<int64_t>(shape_.head_dim - d, W::WIDTH));
        }
    }

    const HeadShape shape_;
    const AttentionInput<T> input_;
    const TileWalk walk_;
    Scratch<RowState> states_;  // one for each row
    const int64_t stripes_;
    Scratch<float> sums_;      // [rows, sums_size]
    Scratch<T> queries_;       // [rows, head_dim]
    Scratch<float> scores_;    // [rows of one key head, KEY_TILE]
    Scratch<T> keys_;          // panels of one key head
    Scratch<Weight> weights_;  // like `scores_`
    Scratch<typename W::Operand> values_;
    Scratch<T> zeros_;  // [head_dim]
};

}  // namespace loraplex
