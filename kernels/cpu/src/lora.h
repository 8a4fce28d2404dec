// The adapters' deltas of fused projections: shrink to rank rows, expand into the outputs.
//
// Work goes by chunks of tokens of one selection, which share the reads of its A and B. Every sum is float32 and in
// an order that depends on the row alone: a value of the shrink is a dot product of fixed lanes, a value of the
// expand is one chain over the selection's slots and their rank rows.
//
// One or two tokens do less arithmetic than it takes to read A and B, so they go through them in the order of memory;
// more tokens go in tiles that fill the registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elementwise.h"
#include "simd.h"
#include "team.h"

namespace loraplex {

constexpr int BLOCK_VECTORS = 12;
constexpr int64_t COLUMN_BLOCK = BLOCK_VECTORS * LANES;   // outputs of one part of the expand
constexpr int EXPAND_SUMS = LANES == 16 ? 24 : 12;        // vectors that the registers hold beside the operands
constexpr int EXPAND_TOKENS = LANES == 16 ? 8 : 2;
constexpr int FEW_TOKENS = 2;                             // memory sets the pace
constexpr int64_t CHUNKS_PER_THREAD = 4;                  // from so many on they are claimed whole

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
    Lora(Team& team, const LoraJob<T>& job, const LoraBatch& batch, const LoraTable& table)
        : team_(team), job_(job), batch_(batch), table_(table), row_size_(table.width * job.slot_rank) {}

    // The shrink and the expand are a phase of the team each, without the barrier at its end. The shrink only reads
    // `x`, so that it can share the phase with the base's product, whose items are in the other list.
    void shrink() const {
        for_each_part(job_.num_slices * table_.width, [&](int64_t chunk, int64_t part) {
            shrink_slot(chunk, part / table_.width, part % table_.width);
        });
    }

    void expand() const {
        if (table_.width == 0) return;
        int64_t num_blocks = 0;
        for (int64_t slice = 0; slice < job_.num_slices; slice++) num_blocks += column_blocks(slice);
        for_each_part(num_blocks, [&](int64_t chunk, int64_t block) { expand_block(chunk, block); });
    }

private:
    // Calls `f(chunk, part)` for all parts of all chunks. Many chunks are claimed whole, few part by part.
    template <class F> void for_each_part(int64_t num_parts, const F& f) const {
        const int64_t size = batch_.num_chunks >= CHUNKS_PER_THREAD * team_.size() ? num_parts : 1;
        const auto claim = [&] { return team_.claim(1) * size; };
        for (int64_t first = claim(); first < batch_.num_chunks * num_parts; first = claim())
            for (int64_t part = first; part < first + size; part++) f(part / num_parts, part % num_parts);
    }

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
    void shrink_slot(int64_t chunk, int64_t slice, int64_t index) const {
        const int64_t slot = slots(chunk)[index];
        if (slot < 0) return;
        const float factor = table_.weights[batch_.chunk_selection[chunk] * table_.width + index] *
                             job_.slices[slice].scaling[slot];
        const W* a = static_cast<const W*>(job_.slices[slice].a) + slot * job_.slot_rank * job_.in_features;
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
            for (int i = 0; i < num_tokens; i++) {
                float* row = target + i * row_size_ + rank;
                num_ranks == RANKS ? std::copy_n(values + i * RANKS, RANKS, row)
                                   : std::copy_n(values + i * RANKS, num_ranks, row);
            }
        }
    }

    template <int TOKENS, int RANKS> Vec dots(const T* const (&x)[TOKENS], const W* const (&a)[RANKS]) const {
        constexpr int TOGETHER = TOKENS <= FEW_TOKENS ? 1 : RANKS;
        Vec partial[LANES];
        for (int i = TOKENS * RANKS; i < LANES; i++) partial[i] = zero();
        for (int rank = 0; rank < RANKS; rank += TOGETHER) add_dots<TOKENS, RANKS, TOGETHER>(x, a + rank, partial + rank);
        return sums(partial);
    }

    // partial[token * RANKS + rank] = the product of fixed lanes, for ROWS rank rows side by side
    template <int TOKENS, int RANKS, int ROWS>
    void add_dots(const T* const (&x)[TOKENS], const W* const* a, Vec* partial) const {
        using D = RowDot<T, W>;
        Vec dots[TOKENS][ROWS];
        for (int i = 0; i < TOKENS; i++)
            for (int j = 0; j < ROWS; j++) dots[i][j] = zero();
        const auto add = [&](const auto& load) {
            typename D::Operand values[TOKENS];
            for (int i = 0; i < TOKENS; i++) values[i] = load(x[i]);
            for (int j = 0; j < ROWS; j++) {
                const auto row = load(a[j]);
                for (int i = 0; i < TOKENS; i++) dots[i][j] = D::dot(dots[i][j], values[i], row);
            }
        };
        int64_t k = 0;
        for (; k + D::WIDTH <= job_.in_features; k += D::WIDTH) add([k](const auto* p) { return D::load(p + k); });
        if (const int rest = static_cast<int>(job_.in_features - k); rest > 0)
            add([k, rest](const auto* p) { return D::load_partial(p + k, rest); });
        for (int i = 0; i < TOKENS; i++)
            for (int j = 0; j < ROWS; j++) partial[i * RANKS + j] = dots[i][j];
    }

    void expand_block(int64_t chunk, int64_t block) const {
        if (slots(chunk)[0] < 0) return;
        int64_t slice = 0, offset = 0;
        for (; block >= column_blocks(slice); slice++) {
            block -= column_blocks(slice);
            offset += job_.slices[slice].out_features;
        }
        const int64_t start = block * COLUMN_BLOCK;
        const int64_t end = std::min(start + COLUMN_BLOCK, job_.slices[slice].out_features);
        expand_tokens<EXPAND_TOKENS>(chunk, slice, 0, offset, start, end);
    }

    // From token `place` on, TOKENS at a time, then half as many.
    template <int TOKENS>
    void expand_tokens(int64_t chunk, int64_t slice, int64_t place, int64_t offset, int64_t start, int64_t end) const {
        for (; place + TOKENS <= batch_.chunk_len[chunk]; place += TOKENS)
            expand_rows<TOKENS>(chunk, slice, place, offset, start, end);
        if constexpr (TOKENS > 1) expand_tokens<TOKENS / 2>(chunk, slice, place, offset, start, end);
    }

    // y[token, offset + column] += sum over rank rows of shrunk[token, row] * B[row, column], start <= column < end
    template <int TOKENS>
    void expand_rows(int64_t chunk, int64_t slice, int64_t place, int64_t offset, int64_t start, int64_t end) const {
        constexpr int COLUMNS = std::min(BLOCK_VECTORS, EXPAND_SUMS / TOKENS);
        const float* shrunk = shrunk_row(chunk, slice, place);
        T* y[TOKENS];
        for (int i = 0; i < TOKENS; i++) y[i] = job_.y + tokens(chunk)[place + i] * job_.y_stride + offset;
        int64_t column = start;
        for (; column + COLUMNS * LANES <= end; column += COLUMNS * LANES)
            expand_columns<TOKENS, COLUMNS>(chunk, slice, shrunk, y, column, Whole());
        for (; column + 3 * LANES <= end; column += 3 * LANES)
            expand_columns<TOKENS, 3>(chunk, slice, shrunk, y, column, Whole());
        for (; column + LANES <= end; column += LANES)
            expand_columns<TOKENS, 1>(chunk, slice, shrunk, y, column, Whole());
        if (column < end) expand_columns<TOKENS, 1>(chunk, slice, shrunk, y, column, static_cast<int>(end - column));
    }

    // COLUMNS vectors of `n` lanes, all of them or one vector with fewer.
    template <int TOKENS, int COLUMNS, class Count>
    void expand_columns(int64_t chunk, int64_t slice, const float* shrunk, T* const (&y)[TOKENS], int64_t column,
                        Count n) const {
        const int64_t out_features = job_.slices[slice].out_features;
        const W* first = static_cast<const W*>(job_.slices[slice].b) + column;
        const int64_t slot_size = job_.slot_rank * out_features;
        Vec delta[TOKENS][COLUMNS];
        for (int i = 0; i < TOKENS; i++)
            for (int c = 0; c < COLUMNS; c++) delta[i][c] = zero();
        for (int index = 0, count = num_slots(chunk); index < count; index++) {
            const W* b = first + slots(chunk)[index] * slot_size;
            // what comes next: the same columns of the next slot, or the next columns of the first one
            const W* next = index + 1 < count ? first + slots(chunk)[index + 1] * slot_size
                                              : first + slots(chunk)[0] * slot_size + COLUMNS * LANES;
            for (int64_t rank = 0; rank < job_.slot_rank; rank++, b += out_features, next += out_features) {
                if constexpr (TOKENS <= FEW_TOKENS) prefetch(next, COLUMNS * LANES * sizeof(W));
                Vec values[TOKENS];
                for (int i = 0; i < TOKENS; i++)
                    values[i] = set1(shrunk[i * row_size_ + index * job_.slot_rank + rank]);
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

    Team& team_;
    const LoraJob<T> job_;
    const LoraBatch batch_;
    const LoraTable table_;
    const int64_t row_size_;
};

enum class PoolType : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

// Calls `f` with the job's `Lora`.
template <class T, class F>
void with_lora(Team& team, const LoraJob<T>& job, const LoraBatch& batch, const LoraTable& table, PoolType type,
               const F& f) {
    if (type == PoolType::FLOAT32) {
        f(Lora<T, float>(team, job, batch, table));
    } else {
        f(Lora<T, bf16>(team, job, batch, table));
    }
}

}  // namespace loraplex
