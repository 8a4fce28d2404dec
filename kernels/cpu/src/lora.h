// The adapters' deltas of fused projections: shrink to rank rows, expand into the outputs.
//
// Work goes by chunks of tokens of one selection, which share the reads of its A and B. Every sum is float32 and in
// an order that depends on the row alone: a value of the shrink is a dot product of fixed lanes, a value of the
// expand is one chain over the selection's slots and their rank rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elementwise.h"
#include "simd.h"
#include "team.h"

namespace loraplex {

constexpr int64_t COLUMN_BLOCK = 256;  // outputs of one work item of the expand

struct LoraBatch {
    const int64_t* token_order;
    const int32_t* chunk_selection;  // each [num_chunks]
    const int32_t* chunk_start;      // offset into token_order
    const int32_t* chunk_len;
    int64_t num_chunks;
    int64_t num_tokens;  // in all chunks together
};

struct LoraTable {
    const int32_t* slots;  // [num_selections, width], -1 ends a row
    const float* weights;
    int64_t width;
};

// One projection of one layer.
struct LoraSlice {
    const void* a;         // [num_slots, slot_rank, in]
    const void* b;         // [num_slots, slot_rank, out]
    const float* scaling;  // [num_slots]
    int64_t out_features;
};

template <class T> struct LoraJob {
    const T* x;  // rows `x_stride` apart
    int64_t x_stride;
    int64_t in_features;
    T* y;  // the slices' outputs side by side, rows `y_stride` apart
    int64_t y_stride;
    const LoraSlice* slices;
    int64_t num_slices;
    int64_t slot_rank;
    float* shrunk;  // scratch [num_slices, num_tokens, width * slot_rank]
};

// W: the type of A and B.
template <class T, class W> class Lora {
public:
    Lora(const LoraJob<T>& job, const LoraBatch& batch, const LoraTable& table)
        : job_(job), batch_(batch), table_(table), row_size_(table.width * job.slot_rank) {}

    // Two phases of the team, the barrier between them included, the one at the end not.
    void run(Team& team) const {
        const int64_t num_shrinks = batch_.num_chunks * job_.num_slices * table_.width;
        for (int64_t item = team.claim(); item < num_shrinks; item = team.claim())
            shrink(item / table_.width / job_.num_slices, item / table_.width % job_.num_slices, item % table_.width);
        team.finish_phase();
        int64_t num_blocks = 0;
        for (int64_t slice = 0; slice < job_.num_slices; slice++) num_blocks += column_blocks(slice);
        for (int64_t item = team.claim(); item < batch_.num_chunks * num_blocks; item = team.claim())
            expand_item(item / num_blocks, item % num_blocks);
    }

private:
    int64_t column_blocks(int64_t slice) const {
        return (job_.slices[slice].out_features + COLUMN_BLOCK - 1) / COLUMN_BLOCK;
    }

    const int64_t* tokens(int64_t chunk) const { return batch_.token_order + batch_.chunk_start[chunk]; }

    const int32_t* slots(int64_t chunk) const { return table_.slots + batch_.chunk_selection[chunk] * table_.width; }

    float* shrunk_row(int64_t chunk, int64_t slice, int64_t place) const {
        return job_.shrunk + (slice * batch_.num_tokens + batch_.chunk_start[chunk] + place) * row_size_;
    }

    int num_slots(int64_t chunk) const {
        int count = 0;
        while (count < table_.width && slots(chunk)[count] >= 0) count++;
        return count;
    }

    // shrunk[token, rank row] = weight * scaling * (A[rank row] . x[token]) for one slot
    void shrink(int64_t chunk, int64_t slice, int64_t index) const {
        if (index >= num_slots(chunk)) return;
        const int64_t slot = slots(chunk)[index];
        const float factor = table_.weights[batch_.chunk_selection[chunk] * table_.width + index] *
                             job_.slices[slice].scaling[slot];
        const W* a = static_cast<const W*>(job_.slices[slice].a) + slot * job_.slot_rank * job_.in_features;
        prefetch(a, job_.slot_rank * job_.in_features * sizeof(W));
        const int64_t num_tokens = batch_.chunk_len[chunk];
        for (int64_t place = 0; place < num_tokens;) {
            const int64_t left = num_tokens - place;
            float* target = shrunk_row(chunk, slice, place) + index * job_.slot_rank;
            const int64_t* rows = tokens(chunk) + place;
            if (left >= 3) {
                shrink_rows<4>(rows, std::min<int64_t>(left, 4), a, factor, target);
                place += 4;
            } else {
                left == 2 ? shrink_rows<2>(rows, 2, a, factor, target) : shrink_rows<1>(rows, 1, a, factor, target);
                place += left;
            }
        }
    }

    // TOKENS rows of x, of which `num_tokens` are real, with all rank rows of a slot.
    template <int TOKENS>
    void shrink_rows(const int64_t* rows, int64_t num_tokens, const W* a, float factor, float* target) const {
        constexpr int RANKS = std::min(LANES / TOKENS, 8);
        const T* x[TOKENS];
        for (int i = 0; i < TOKENS; i++) x[i] = job_.x + rows[std::min<int64_t>(i, num_tokens - 1)] * job_.x_stride;
        for (int64_t rank = 0; rank < job_.slot_rank; rank += RANKS) {
            const int num_ranks = static_cast<int>(std::min<int64_t>(RANKS, job_.slot_rank - rank));
            const W* a_rows[RANKS];
            for (int j = 0; j < RANKS; j++) a_rows[j] = a + (rank + std::min(j, num_ranks - 1)) * job_.in_features;
            alignas(64) float values[LANES];
            store(values, dots<TOKENS, RANKS>(x, a_rows) * set1(factor));
            for (int i = 0; i < num_tokens; i++)
                std::copy_n(values + i * RANKS, num_ranks, target + i * row_size_ + rank);
        }
    }

    template <int TOKENS, int RANKS> Vec dots(const T* const (&x)[TOKENS], const W* const (&a)[RANKS]) const {
        using D = RowDot<T, W>;
        Vec partial[LANES];
        for (int i = 0; i < LANES; i++) partial[i] = zero();
        int64_t k = 0;
        for (; k + D::WIDTH <= job_.in_features; k += D::WIDTH) {
            typename D::Operand values[TOKENS];
            for (int i = 0; i < TOKENS; i++) values[i] = D::load(x[i] + k);
#pragma GCC unroll 8
            for (int j = 0; j < RANKS; j++) {
                const auto row = D::load(a[j] + k);
                for (int i = 0; i < TOKENS; i++) partial[i * RANKS + j] = D::dot(partial[i * RANKS + j], values[i], row);
            }
        }
        if (const int rest = static_cast<int>(job_.in_features - k); rest > 0)
            for (int j = 0; j < RANKS; j++)
                for (int i = 0; i < TOKENS; i++)
                    partial[i * RANKS + j] = D::dot(partial[i * RANKS + j], D::load_partial(x[i] + k, rest),
                                                    D::load_partial(a[j] + k, rest));
        return sums(partial);
    }

    void expand_item(int64_t chunk, int64_t block) const {
        if (num_slots(chunk) == 0) return;
        int64_t slice = 0, offset = 0;
        for (; block >= column_blocks(slice); slice++) {
            block -= column_blocks(slice);
            offset += job_.slices[slice].out_features;
        }
        const int64_t start = block * COLUMN_BLOCK;
        const int64_t end = std::min(start + COLUMN_BLOCK, job_.slices[slice].out_features);
        prefetch_block(chunk, slice, start, end);
        for (int64_t place = 0; place < batch_.chunk_len[chunk]; place += VALUE_ROWS) {
            switch (std::min<int64_t>(VALUE_ROWS, batch_.chunk_len[chunk] - place)) {
                case 1: expand_rows<1>(chunk, slice, place, offset, start, end); break;
                case 2: expand_rows<2>(chunk, slice, place, offset, start, end); break;
                case 3: expand_rows<std::min(3, VALUE_ROWS)>(chunk, slice, place, offset, start, end); break;
                default: expand_rows<VALUE_ROWS>(chunk, slice, place, offset, start, end);
            }
        }
    }

    // B's rows of a block of columns are short pieces far apart, which no processor foresees.
    void prefetch_block(int64_t chunk, int64_t slice, int64_t start, int64_t end) const {
        const int64_t out_features = job_.slices[slice].out_features;
        const W* b = static_cast<const W*>(job_.slices[slice].b);
        for (int index = 0, count = num_slots(chunk); index < count; index++)
            for (int64_t rank = 0; rank < job_.slot_rank; rank++)
                prefetch(b + (slots(chunk)[index] * job_.slot_rank + rank) * out_features + start,
                         (end - start) * sizeof(W));
    }

    // y[token, offset + column] += sum over rank rows of shrunk[token, row] * B[row, column], start <= column < end
    template <int TOKENS>
    void expand_rows(int64_t chunk, int64_t slice, int64_t place, int64_t offset, int64_t start, int64_t end) const {
        const float* shrunk = shrunk_row(chunk, slice, place);
        T* y[TOKENS];
        for (int i = 0; i < TOKENS; i++) y[i] = job_.y + tokens(chunk)[place + i] * job_.y_stride + offset;
        // the fewer tokens, the wider: long runs of B's rows come faster from memory
        constexpr int COLUMNS = 4 * VALUE_ROWS / TOKENS;
        int64_t column = start;
        for (; column + COLUMNS * LANES <= end; column += COLUMNS * LANES)
            expand_columns<TOKENS, COLUMNS>(chunk, slice, shrunk, y, column, Whole());
        for (; column + 4 * LANES <= end; column += 4 * LANES)
            expand_columns<TOKENS, 4>(chunk, slice, shrunk, y, column, Whole());
        for (; column + LANES <= end; column += LANES)
            expand_columns<TOKENS, 1>(chunk, slice, shrunk, y, column, Whole());
        if (column < end) expand_columns<TOKENS, 1>(chunk, slice, shrunk, y, column, static_cast<int>(end - column));
    }

    // COLUMNS vectors of `n` lanes, all of them or one vector with fewer.
    template <int TOKENS, int COLUMNS, class Count>
    void expand_columns(int64_t chunk, int64_t slice, const float* shrunk, T* const (&y)[TOKENS], int64_t column,
                        Count n) const {
        const int64_t out_features = job_.slices[slice].out_features;
        Vec delta[TOKENS][COLUMNS];
        for (int i = 0; i < TOKENS; i++)
            for (int c = 0; c < COLUMNS; c++) delta[i][c] = zero();
        for (int index = 0, count = num_slots(chunk); index < count; index++) {
            const int64_t first_row = slots(chunk)[index] * job_.slot_rank;
            const W* b = static_cast<const W*>(job_.slices[slice].b) + first_row * out_features + column;
            for (int64_t rank = 0; rank < job_.slot_rank; rank++, b += out_features) {
                Vec values[TOKENS];
                for (int i = 0; i < TOKENS; i++)
                    values[i] = set1(shrunk[i * row_size_ + index * job_.slot_rank + rank]);
#pragma GCC unroll 16
                for (int c = 0; c < COLUMNS; c++) {
                    const Vec row = load_n(b + c * LANES, n);
                    for (int i = 0; i < TOKENS; i++) delta[i][c] = fma(values[i], row, delta[i][c]);
                }
            }
        }
        for (int i = 0; i < TOKENS; i++)
            for (int c = 0; c < COLUMNS; c++) {
                T* target = y[i] + column + c * LANES;
                store_n(target, load_n(target, n) + delta[i][c], n);
            }
    }

    const LoraJob<T> job_;
    const LoraBatch batch_;
    const LoraTable table_;
    const int64_t row_size_;
};

enum class PoolType : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

template <class T>
void apply_lora(Team& team, const LoraJob<T>& job, const LoraBatch& batch, const LoraTable& table, PoolType type) {
    if (table.width == 0) return;
    if (type == PoolType::FLOAT32) {
        Lora<T, float>(job, batch, table).run(team);
    } else {
        Lora<T, bf16>(job, batch, table).run(team);
    }
}

}  // namespace loraplex
