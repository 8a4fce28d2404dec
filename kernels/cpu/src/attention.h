// Causal attention over a paged cache, with an online softmax in float32.
//
// Work item: up to QUERY_BLOCK consecutive query tokens of one sequence, with all heads (a tile of the cache is then
// read from front to back), or with the heads of one key head where there are few sequences. Keys
// come in tiles at fixed places of the sequence, and a query takes from a tile only the keys that it sees; so a row's
// bits do not depend on its neighbours, and what is masked or unwritten is never multiplied.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "elementwise.h"
#include "simd.h"
#include "team.h"

namespace loraplex {

constexpr int64_t QUERY_BLOCK = 16;
constexpr int KEY_TILE = 64;
constexpr int64_t BLOCKS_PER_THREAD = 4;  // enough for even shares without splitting the heads
constexpr int64_t WORTH_WIDENING = 4;  // query tokens that share a tile's values
static_assert(KEY_TILE % LANES == 0, "scores are computed a vector at a time");

struct Batch {
    const int32_t* query_start;  // [num_seqs + 1]
    const int32_t* seq_lens;     // [num_seqs]
    const int32_t* block_table;  // [num_seqs, table_width]
    int64_t table_width;
    int64_t num_seqs;
};

struct HeadShape {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;

    int64_t group_size() const { return num_heads / num_kv_heads; }
    int64_t kv_stride() const { return num_kv_heads * head_dim; }  // from a token's keys to the next one's
};

template <class T> struct AttentionInput {
    const T* query;  // [num_tokens, num_heads, head_dim], tokens `query_stride` apart
    int64_t query_stride;
    const T* key;    // [num_blocks, block_size, num_kv_heads, head_dim]
    const T* value;
    float scale;
    int64_t window;  // keys that a query sees, itself included; 0 = all
};

// The places of a tile's keys in the cache, in elements.
struct KeyTile {
    int from;  // the keys [from, to) of the tile are there
    int to;
    int64_t offset[KEY_TILE];

    // The tile at position `start`, cut to the positions [begin, end).
    KeyTile(const int32_t* blocks, const HeadShape& shape, int64_t start, int64_t begin, int64_t end)
        : from(static_cast<int>(std::max(begin - start, int64_t{0}))),
          to(static_cast<int>(std::min(end - start, int64_t{KEY_TILE}))) {
        for (int key = from; key < to; key++) {
            const int64_t position = start + key, block = blocks[position / shape.block_size];
            offset[key] = (block * shape.block_size + position % shape.block_size) * shape.kv_stride();
        }
    }
};

// The values of a tile's keys: in the cache, or widened to float32 once for all queries of a block.
template <class V> struct TileValues {
    const V* start;
    const int64_t* offset;  // [KEY_TILE]
};

// Softmax and weighted sum of one query head so far.
struct RowState {
    float maximum;
    float total;
};

template <class T> class QueryBlock {
public:
    QueryBlock(const HeadShape& shape, const AttentionInput<T>& input, int64_t heads_per_item)
        : shape_(shape), input_(input), heads_per_item_(heads_per_item) {
        const int64_t num_rows = QUERY_BLOCK * heads_per_item * shape.group_size();
        states_.resize(num_rows);
        sums_.resize(num_rows * shape.head_dim);
        weights_.resize(shape.group_size() * KEY_TILE);
        widened_.resize(KEY_TILE * shape.head_dim);
        for (int key = 0; key < KEY_TILE; key++) widened_offset_[key] = key * shape.head_dim;
    }

    // Attends with the query tokens [first, last) of the batch, the first of which stands at `position`.
    void run(const int32_t* blocks, int64_t first_head, int64_t first, int64_t last, int64_t position, T* output,
             int64_t output_stride) {
        const int64_t begin = first_key(position), end = position + (last - first);
        std::fill(states_.begin(), states_.end(), RowState{-INFINITY, 0.0f});
        std::fill(sums_.begin(), sums_.end(), 0.0f);
        const int64_t first_start = begin / KEY_TILE * KEY_TILE;
        KeyTile next(blocks, shape_, first_start, begin, end);
        prefetch_tile(next, first_head);
        for (int64_t start = first_start; start < end; start += KEY_TILE) {
            const KeyTile tile = next;
            if (start + KEY_TILE < end) {
                next = KeyTile(blocks, shape_, start + KEY_TILE, begin, end);
                prefetch_tile(next, first_head);
            }
            for (int64_t head = 0; head < heads_per_item_; head++)
                attend_tile(tile, start, first_head, head, first, last, position);
        }
        const int64_t size = shape_.group_size() * shape_.head_dim;
        for (int64_t token = first; token < last; token++)
            for (int64_t head = 0; head < heads_per_item_; head++)
                finish(first_row(token - first, head), output + token * output_stride + (first_head + head) * size);
    }

private:
    int64_t first_key(int64_t position) const {
        return input_.window == 0 ? 0 : std::max(position + 1 - input_.window, int64_t{0});
    }

    void prefetch_tile(const KeyTile& tile, int64_t first_head) const {
        const int64_t offset = first_head * shape_.head_dim, size = heads_per_item_ * shape_.head_dim * sizeof(T);
        for (int key = tile.from; key < tile.to; key++) prefetch(input_.key + offset + tile.offset[key], size);
        for (int key = tile.from; key < tile.to; key++) prefetch(input_.value + offset + tile.offset[key], size);
    }

    // The rows of one query token with the heads of one key head.
    int64_t first_row(int64_t token, int64_t head) const {
        return (token * heads_per_item_ + head) * shape_.group_size();
    }

    void attend_tile(const KeyTile& tile, int64_t start, int64_t first_head, int64_t head, int64_t first, int64_t last,
                     int64_t position) {
        const int64_t query_offset = (first_head + head) * shape_.group_size() * shape_.head_dim;
        key_ = input_.key + (first_head + head) * shape_.head_dim;
        value_ = input_.value + (first_head + head) * shape_.head_dim;
        const bool is_widened = last - first >= WORTH_WIDENING;
        if (is_widened) widen_values(tile);
        for (int64_t token = first; token < last; token++) {
            const int64_t own = position + (token - first);
            const int from = static_cast<int>(std::max(first_key(own) - start, int64_t{0}));
            const int to = static_cast<int>(std::min(own + 1 - start, int64_t{KEY_TILE}));
            if (from >= to) continue;
            const int64_t row = first_row(token - first, head);
            weigh(input_.query + token * input_.query_stride + query_offset, row, tile, from, to);
            if (is_widened) {
                add_values(TileValues<float>{widened_.data(), widened_offset_}, row, from, to);
            } else {
                add_values(TileValues<T>{value_, tile.offset}, row, from, to);
            }
        }
    }

    void widen_values(const KeyTile& tile) {
        for (int key = tile.from; key < tile.to; key++)
            for_each_vector(shape_.head_dim, [&](int64_t i, auto n) {
                store_n(widened_.data() + widened_offset_[key] + i, load_n(value_ + tile.offset[key] + i, n), n);
            });
    }

    // The weights of one query token's heads, over the keys [from, to) of a tile.
    void weigh(const T* query, int64_t first_row, const KeyTile& tile, int from, int to) {
        for (int start = from / LANES * LANES; start < to; start += LANES) {
            const T* keys[LANES];
            for (int i = 0; i < LANES; i++)  // places out of range repeat one within; their scores are not used
                keys[i] = key_ + tile.offset[std::min(std::max(start + i, from), to - 1)];
            for (int64_t head = 0; head < shape_.group_size(); head++)
                store(weights_.data() + head * KEY_TILE + start,
                      dots(query + head * shape_.head_dim, keys) * set1(input_.scale));
        }
        for (int64_t head = 0; head < shape_.group_size(); head++)
            reweigh(first_row + head, from, to, weights_.data() + head * KEY_TILE);
    }

    Vec dots(const T* query, const T* const (&keys)[LANES]) const {
        using D = RowDot<T, T>;
        Vec partial[LANES];
        for (int i = 0; i < LANES; i++) partial[i] = zero();
        int64_t d = 0;
        for (; d + D::WIDTH <= shape_.head_dim; d += D::WIDTH) {
            const auto q = D::load(query + d);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) partial[i] = D::dot(partial[i], q, D::load(keys[i] + d));
        }
        if (const int rest = static_cast<int>(shape_.head_dim - d); rest > 0) {
            const auto q = D::load_partial(query + d, rest);
            for (int i = 0; i < LANES; i++) partial[i] = D::dot(partial[i], q, D::load_partial(keys[i] + d, rest));
        }
        return sums(partial);
    }

    // Scores become weights e^(score - maximum), 0 outside [from, to); what was summed before follows the maximum.
    void reweigh(int64_t row, int from, int to, float* weights) {
        const int begin = from / LANES * LANES, end = (to + LANES - 1) / LANES * LANES;
        std::fill(weights + begin, weights + from, -INFINITY);
        std::fill(weights + to, weights + end, -INFINITY);
        RowState& state = states_[row];
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
            float* sums = sums_.data() + row * shape_.head_dim;
            for_each_vector(shape_.head_dim,
                            [&](int64_t i, auto n) { store_n(sums + i, load_n(sums + i, n) * set1(decay), n); });
        }
    }

    // sums[row] += sum over the keys of weights[row, key] * value[key], for the rows of one query token
    template <class V> void add_values(const TileValues<V>& values, int64_t first_row, int from, int to) {
        const int64_t group = shape_.group_size();
        for (int64_t head = 0; head < group; head += VALUE_ROWS) {
            const float* weights = weights_.data() + head * KEY_TILE;
            float* sums = sums_.data() + (first_row + head) * shape_.head_dim;
            switch (std::min<int64_t>(VALUE_ROWS, group - head)) {
                case 1: add_rows<1>(values, from, to, weights, sums); break;
                case 2: add_rows<2>(values, from, to, weights, sums); break;
                case 3: add_rows<std::min(3, VALUE_ROWS)>(values, from, to, weights, sums); break;
                default: add_rows<VALUE_ROWS>(values, from, to, weights, sums);
            }
        }
    }

    template <int ROWS, class V>
    void add_rows(const TileValues<V>& values, int from, int to, const float* weights, float* sums) const {
        int64_t d = 0;
        for (; d + 4 * LANES <= shape_.head_dim; d += 4 * LANES)
            add_columns<ROWS, 4>(values, from, to, weights, sums + d, d, Whole());
        for (; d + LANES <= shape_.head_dim; d += LANES)
            add_columns<ROWS, 1>(values, from, to, weights, sums + d, d, Whole());
        if (d < shape_.head_dim)
            add_columns<ROWS, 1>(values, from, to, weights, sums + d, d, static_cast<int>(shape_.head_dim - d));
    }

    // COLUMNS vectors of `n` lanes, all of them or one vector with fewer.
    template <int ROWS, int COLUMNS, class V, class Count>
    void add_columns(const TileValues<V>& values, int from, int to, const float* weights, float* sums, int64_t d,
                     Count n) const {
        Vec acc[ROWS][COLUMNS];
        for (int row = 0; row < ROWS; row++)
            for (int c = 0; c < COLUMNS; c++) acc[row][c] = load_n(sums + row * shape_.head_dim + c * LANES, n);
        for (int key = from; key < to; key++) {
            const V* value = values.start + values.offset[key] + d;
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

    void finish(int64_t first_row, T* output) const {
        for (int64_t head = 0; head < shape_.group_size(); head++) {
            const float* sums = sums_.data() + (first_row + head) * shape_.head_dim;
            T* target = output + head * shape_.head_dim;
            const Vec factor = set1(1.0f / states_[first_row + head].total);
            for_each_vector(shape_.head_dim,
                            [&](int64_t i, auto n) { store_n(target + i, load_n(sums + i, n) * factor, n); });
        }
    }

    const HeadShape shape_;
    const AttentionInput<T> input_;
    const int64_t heads_per_item_;  // key heads
    const T* key_ = nullptr;  // of the head in work
    const T* value_ = nullptr;
    std::vector<RowState> states_;
    std::vector<float> sums_;     // [QUERY_BLOCK * group_size, head_dim]
    std::vector<float> weights_;  // [group_size, KEY_TILE], of one query token
    std::vector<float> widened_;  // [KEY_TILE, head_dim]
    int64_t widened_offset_[KEY_TILE];
};

inline int64_t query_blocks(int64_t query_len) { return (query_len + QUERY_BLOCK - 1) / QUERY_BLOCK; }

// One phase of the team, without the barrier at its end.
template <class T>
void attend(Team& team, const AttentionInput<T>& input, const HeadShape& shape, const Batch& batch, T* output,
            int64_t output_stride) {
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < batch.num_seqs; i++)
        num_blocks += query_blocks(batch.query_start[i + 1] - batch.query_start[i]);
    const bool is_split = num_blocks < BLOCKS_PER_THREAD * team.size();
    const int64_t items_per_block = is_split ? shape.num_kv_heads : 1;
    QueryBlock<T> query_block(shape, input, shape.num_kv_heads / items_per_block);
    int64_t sequence = 0, first_item = 0;  // items are claimed in rising order
    for (int64_t item = team.claim();; item = team.claim()) {
        int64_t start = 0, query_len = 0, num_items = 0;
        for (; sequence < batch.num_seqs; sequence++, first_item += num_items) {
            start = batch.query_start[sequence];
            query_len = batch.query_start[sequence + 1] - start;
            num_items = query_blocks(query_len) * items_per_block;
            if (item < first_item + num_items) break;
        }
        if (sequence == batch.num_seqs) return;
        const int64_t offset = (item - first_item) / items_per_block * QUERY_BLOCK;
        query_block.run(batch.block_table + sequence * batch.table_width, (item - first_item) % items_per_block,
                        start + offset, start + std::min(offset + QUERY_BLOCK, query_len),
                        batch.seq_lens[sequence] - query_len + offset, output, output_stride);
    }
}

// Writes one token's heads at its place; a negative place is nobody's.
template <class T>
void store_token(const T* key, const T* value, T* key_cache, T* value_cache, int64_t place, int64_t kv_stride) {
    if (place < 0) return;
    std::memcpy(key_cache + place * kv_stride, key, kv_stride * sizeof(T));
    std::memcpy(value_cache + place * kv_stride, value, kv_stride * sizeof(T));
}

}  // namespace loraplex
