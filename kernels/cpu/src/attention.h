// Causal attention over a paged cache.
//
// Work item: a few consecutive query tokens of one sequence, with all heads (a tile of the cache is then read from
// front to back), or with the heads of one key head where there are few sequences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "query_block.h"
#include "team.h"

namespace loraplex {

constexpr int64_t BLOCKS_PER_THREAD = 4;  // enough for even shares without splitting the heads

struct Batch {
    const int32_t* query_start;  // [num_seqs + 1]
    const int32_t* seq_lens;     // [num_seqs]
    const int32_t* block_table;  // [num_seqs, table_width]
    int64_t table_width;
    int64_t num_seqs;
};

inline int64_t query_blocks(int64_t query_len) { return (query_len + QUERY_BLOCK - 1) / QUERY_BLOCK; }

// The items of a batch, the longest first: what is left at the end is then small, and the shares come out even.
inline std::vector<QueryItem> query_items(const Batch& batch, const HeadShape& shape, int num_threads) {
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < batch.num_seqs; i++)
        num_blocks += query_blocks(batch.query_start[i + 1] - batch.query_start[i]);
    const bool is_split = num_blocks < BLOCKS_PER_THREAD * num_threads;
    const int64_t num_heads = is_split ? 1 : shape.num_kv_heads;
    std::vector<QueryItem> items;
    items.reserve(num_blocks * shape.num_kv_heads / num_heads);
    for (int64_t i = 0; i < batch.num_seqs; i++) {
        const int64_t start = batch.query_start[i], end = batch.query_start[i + 1];
        const int64_t context = batch.seq_lens[i] - (end - start);
        for (int64_t first = start; first < end; first += QUERY_BLOCK)
            for (int64_t head = 0; head < shape.num_kv_heads; head += num_heads)
                items.push_back({batch.block_table + i * batch.table_width, context + first - start, first,
                                 std::min(first + QUERY_BLOCK, end), head, num_heads});
    }
    const auto work = [](const QueryItem& item) { return item.num_tokens() * item.end(); };
    std::sort(items.begin(), items.end(), [&](const auto& a, const auto& b) { return work(a) > work(b); });
    return items;
}

// One phase of the team, without the barrier at its end.
template <class T>
void attend(Team& team, const std::vector<QueryItem>& items, const AttentionInput<T>& input, const HeadShape& shape,
            T* output, int64_t output_stride) {
    if (items.empty()) return;
    QueryBlock<T> query_block(shape, input, items.front().num_heads);
    const int64_t size = static_cast<int64_t>(items.size());
    for (int64_t item = team.claim(); item < size; item = team.claim()) {
        const int64_t next = item + team.size();
        query_block.run(items[item], next < size ? &items[next] : nullptr, output, output_stride);
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
