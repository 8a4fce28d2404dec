// A tile's values as the second factor of weights times values: read where the cache has them, or packed for many rows.
//
// A step of the product takes KEYS keys, a stripe of it WIDTH dimensions: VECTORS vectors, in an order of their own,
// which is undone at the end. Dimensions beyond the last one are zeros. Loads are always inlined: a call in the inner
// loop would spill its accumulators.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elementwise.h"
#include "key_tile.h"
#include "simd.h"

namespace loraplex {

constexpr int ASK_STEPS = 4;  // from one request for a later tile to the next: each one costs, and so does a burst

template <class T> struct Weighing {
    static constexpr int KEYS = 1;
    static constexpr int WIDTH = LANES;
    static constexpr int VECTORS = 1;
    using Weight = float;
    using Operand = Vec;

    __attribute__((always_inline)) static void load(const T* const (&rows)[KEYS], Operand* values) {
        values[0] = loraplex::load(rows[0]);
    }
    static void load_partial(const T* const (&rows)[KEYS], int n, Operand* values) {
        values[0] = loraplex::load_partial(rows[0], n);
    }
    static Vec exp(Vec x) { return loraplex::exp(x); }
    static Operand broadcast(const Weight* weights) { return set1(*weights); }
    static Vec dot(Vec sum, Operand value, Operand weight) { return fma(weight, value, sum); }
    static void store(T* output, const Vec* sums, int64_t n) { store_n(output, sums[0], static_cast<int>(n)); }
};

#if defined(LORAPLEX_BF16_DOT)
// Weights are rounded to bf16, as flash attention does on a GPU; then two keys take one instruction.
template <> struct Weighing<bf16> {
    static constexpr int KEYS = 2;
    static constexpr int WIDTH = 2 * LANES;
    static constexpr int VECTORS = 2;
    using Weight = bf16;
    using Operand = Pair;

    __attribute__((always_inline)) static void load(const bf16* const (&rows)[KEYS], Operand* values) {
        interleave(load_pairs(rows[0]), load_pairs(rows[1]), values);
    }
    static void load_partial(const bf16* const (&rows)[KEYS], int n, Operand* values) {
        interleave(load_pairs_partial(rows[0], n), load_pairs_partial(rows[1], n), values);
    }
    // e^x for x <= 0 within 3 parts in a million, a thousandth of what rounding to bf16 loses; exactly 0 for -infinity,
    // NaN for NaN.
    static Vec exp(Vec x) {
        const Vec power = maximum(set1(-200.0f), x * set1(1.44269504f));
        const Vec n = round_to_int(power), r = power - n;
        Vec p = set1(0.00958264f);  // 2^r for |r| <= 0.5: 1 at 0, the largest relative error the smallest
        p = fma(p, r, set1(0.05590581f));
        p = fma(p, r, set1(0.24024099f));
        p = fma(p, r, set1(0.69312427f));
        return times_power_of_two(fma(p, r, set1(1.0f)), n);
    }

    static Operand broadcast(const Weight* weights) { return broadcast_pair(weights); }
    static Vec dot(Vec sum, Operand value, Operand weight) { return loraplex::dot(sum, value, weight); }
    static void store(bf16* output, const Vec* sums, int64_t n) {
        Vec halves[VECTORS];
        deinterleave(sums, halves);
        store_n(output, halves[0], static_cast<int>(std::min<int64_t>(n, LANES)));
        if (n > LANES) store_n(output + LANES, halves[1], static_cast<int>(n - LANES));
    }
};
#endif

template <class T> int64_t num_stripes(int64_t head_dim) {
    return (head_dim + Weighing<T>::WIDTH - 1) / Weighing<T>::WIDTH;
}

// The values [from, to) of a tile where the cache has them; what else a step would take is zeros, and never read. Asks
// for those of a later tile on the way.
template <class T> struct CachedValues {
    using W = Weighing<T>;

    const T* start;
    const T* zeros;  // [head_dim]
    int64_t head_dim;
    const KeyTile& tile;
    const Upcoming<T>& upcoming;
    int from;
    int to;

    int first_step() const { return from / W::KEYS; }
    int last_step() const { return (to + W::KEYS - 1) / W::KEYS; }

    template <int STRIPES, bool ARE_WHOLE>
    __attribute__((always_inline)) void load(int step, int64_t stripe, typename W::Operand* values) const {
        if (step % ASK_STEPS == 0) upcoming.ask(step * W::KEYS, ASK_STEPS * W::KEYS);
        const T* rows[W::KEYS];
#pragma GCC unroll 8
        for (int i = 0; i < W::KEYS; i++) rows[i] = row(step * W::KEYS + i);
#pragma GCC unroll 8
        for (int i = 0; i < STRIPES; i++) {
            const int64_t d = (stripe + i) * W::WIDTH;
            const T* parts[W::KEYS];
            for (int k = 0; k < W::KEYS; k++) parts[k] = rows[k] + d;
            if constexpr (ARE_WHOLE) {
                W::load(parts, values + i * W::VECTORS);
            } else {
                W::load_partial(parts, static_cast<int>(head_dim - d), values + i * W::VECTORS);
            }
        }
    }

private:
    const T* row(int key) const { return from <= key && key < to ? start + tile.offset[key] : zeros; }
};

// [steps, stripes] of operands
template <class T> struct PackedValues {
    using W = Weighing<T>;

    typename W::Operand* start;
    int64_t stripes;

    typename W::Operand* at(int step, int64_t stripe) const { return start + (step * stripes + stripe) * W::VECTORS; }

    void pack(const CachedValues<T>& cached) const {
        for (int step = cached.first_step(); step < cached.last_step(); step++)
            for (int64_t stripe = 0; stripe < stripes; stripe++)
                if ((stripe + 1) * W::WIDTH <= cached.head_dim) {
                    cached.template load<1, true>(step, stripe, at(step, stripe));
                } else {
                    cached.template load<1, false>(step, stripe, at(step, stripe));
                }
    }

    template <int STRIPES, bool ARE_WHOLE>
    __attribute__((always_inline)) void load(int step, int64_t stripe, typename W::Operand* values) const {
#pragma GCC unroll 8
        for (int i = 0; i < STRIPES * W::VECTORS; i++) values[i] = at(step, stripe)[i];
    }
};

// Packed values as one token sees them: of a step that it sees in part, the cache has them.
template <class T> struct SeenValues {
    using W = Weighing<T>;

    const PackedValues<T>& packed;
    const CachedValues<T>& cached;

    template <int STRIPES, bool ARE_WHOLE>
    __attribute__((always_inline)) void load(int step, int64_t stripe, typename W::Operand* values) const {
        if (cached.from <= step * W::KEYS && (step + 1) * W::KEYS <= cached.to) {
            packed.template load<STRIPES, ARE_WHOLE>(step, stripe, values);
        } else {
            cached.template load<STRIPES, ARE_WHOLE>(step, stripe, values);
        }
    }
};

}  // namespace loraplex
