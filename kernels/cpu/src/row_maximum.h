// Where the largest value of a row is, and whether all of the row is finite: one pass for what every row of logits is
// asked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace loraplex {

constexpr int64_t SEARCH_BLOCK = 256;  // values in which the place of the largest is looked for at the end
constexpr int32_t INFINITY_BITS = 0x7f800000;

// The bits of a float as an integer that grows with it: infinities and NaN lie beyond all others at both ends. The
// compiler makes vectors of comparisons of integers, not of floats. Adding 0 turns -0 into 0, which it equals.
inline int32_t ordered_bits(float x) {
    x += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// `place` (the first of several) says something only if `is_finite`; the row has at least one value.
template <class T> void row_maximum(const T* row, int64_t size, int64_t* place, bool* is_finite) {
    int32_t largest = std::numeric_limits<int32_t>::min(), smallest = std::numeric_limits<int32_t>::max();
    int64_t found = 0;
    for (int64_t start = 0; start < size; start += SEARCH_BLOCK) {
        const int64_t end = std::min(start + SEARCH_BLOCK, size);
        int32_t high = std::numeric_limits<int32_t>::min();
        for (int64_t i = start; i < end; i++) {
            const int32_t bits = ordered_bits(to_float(row[i]));
            high = std::max(high, bits);
            smallest = std::min(smallest, bits);
        }
        if (high > largest) {
            largest = high;
            found = start;
        }
    }
    while (ordered_bits(to_float(row[found])) != largest) found++;
    *place = found;
    *is_finite = largest < INFINITY_BITS && smallest > ~INFINITY_BITS;
}

}  // namespace loraplex
