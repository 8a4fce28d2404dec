// Vectors of float32 for AVX-512 (with bf16 dot products where there are any), AVX2, and any other processor.
//
// Everything else is written once, on these names. Each result lane depends on its own operands only, and a partial
// load or store never touches memory beyond its `n` elements.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LORAPLEX_AVX512 1
#if defined(__AVX512BF16__)
#define LORAPLEX_BF16_DOT 1
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#define LORAPLEX_AVX2 1
#endif

namespace loraplex {

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t word = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &word, sizeof result);
    return result;
}

template <class T> T from_float(float x);

template <> inline float from_float<float>(float x) { return x; }

// Round to nearest, ties to even; a NaN stays one.
template <> inline bf16 from_float<bf16>(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    if ((word & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((word >> 16) | 0x40)};
    return {static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
}

#if defined(LORAPLEX_AVX512)

using Vec = __m512;
constexpr int LANES = 16;
constexpr int TILE_ROWS = 8;  // of a product: 24 accumulators, 3 vectors of weights, 1 broadcast
constexpr int TILE_COLUMNS = 3;
constexpr int VALUE_ROWS = 6;  // of attention: 24 accumulators, 4 values, 1 broadcast

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline Vec load_partial(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec round_to_int(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec zero_below(Vec x, Vec bound, Vec value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), value);
}
inline Vec power_of_two(Vec n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store_partial(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }

inline __m256i narrow(Vec x) {
#if defined(LORAPLEX_BF16_DOT)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i word = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan, word, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}
inline void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store_partial(bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }

// Lane i of the result is the sum of the lanes of x[i], in an order that is the same for every i.
inline Vec sums(const Vec* x) {
    Vec quads[4];
    for (int i = 0; i < 4; i++) {
        const Vec ab = _mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]) + _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]);
        const Vec cd = _mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]) + _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]);
        const __m512d abd = _mm512_castps_pd(ab), cdd = _mm512_castps_pd(cd);
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(abd, cdd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(abd, cdd));
    }
    const Vec low = _mm512_shuffle_f32x4(quads[0], quads[1], 0x88) + _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd);
    const Vec high = _mm512_shuffle_f32x4(quads[2], quads[3], 0x88) + _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd);
    return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
}

// Rows become columns.
inline void transpose(Vec (&x)[LANES]) {
    Vec quads[LANES];  // of each four rows: their columns i, i + 4, i + 8, i + 12
    for (int i = 0; i < LANES; i += 4) {
        const __m512d low_ab = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));
        const __m512d high_ab = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
        const __m512d low_cd = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
        const __m512d high_cd = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_ab, low_cd));
        quads[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_ab, low_cd));
        quads[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_ab, high_cd));
        quads[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_ab, high_cd));
    }
    for (int i = 0; i < 4; i++) {
        const Vec even_top = _mm512_shuffle_f32x4(quads[i], quads[i + 4], 0x88);
        const Vec odd_top = _mm512_shuffle_f32x4(quads[i], quads[i + 4], 0xdd);
        const Vec even_bottom = _mm512_shuffle_f32x4(quads[i + 8], quads[i + 12], 0x88);
        const Vec odd_bottom = _mm512_shuffle_f32x4(quads[i + 8], quads[i + 12], 0xdd);
        x[i] = _mm512_shuffle_f32x4(even_top, even_bottom, 0x88);
        x[i + 4] = _mm512_shuffle_f32x4(odd_top, odd_bottom, 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(even_top, even_bottom, 0xdd);
        x[i + 12] = _mm512_shuffle_f32x4(odd_top, odd_bottom, 0xdd);
    }
}

#elif defined(LORAPLEX_AVX2)

using Vec = __m256;
constexpr int LANES = 8;
constexpr int TILE_ROWS = 5;
constexpr int TILE_COLUMNS = 2;
constexpr int VALUE_ROWS = 2;

inline __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Vec load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_partial(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
inline Vec load_partial(const bf16* p, int n) {
    alignas(16) bf16 copy[LANES] = {};
    std::memcpy(copy, p, n * sizeof(bf16));
    return load(copy);
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec round_to_int(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec zero_below(Vec x, Vec bound, Vec value) {
    return _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_NLT_UQ), value);
}
inline Vec power_of_two(Vec n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline float sum(Vec x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
inline float largest(Vec x) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store_partial(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first(n), x); }

inline __m128i narrow(Vec x) {
    const __m256i word = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(word, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x400000));
    const Vec is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i kept = _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan));
    const __m256i halves = _mm256_srli_epi32(kept, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline void store(bf16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
inline void store_partial(bf16* p, Vec x, int n) {
    alignas(16) bf16 copy[LANES];
    store(copy, x);
    std::memcpy(p, copy, n * sizeof(bf16));
}

inline Vec sums(const Vec* x) {
    Vec quads[2];
    for (int i = 0; i < 2; i++) {
        const Vec ab = _mm256_unpacklo_ps(x[4 * i], x[4 * i + 1]) + _mm256_unpackhi_ps(x[4 * i], x[4 * i + 1]);
        const Vec cd = _mm256_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]) + _mm256_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]);
        const __m256d abd = _mm256_castps_pd(ab), cdd = _mm256_castps_pd(cd);
        quads[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(abd, cdd)) + _mm256_castpd_ps(_mm256_unpackhi_pd(abd, cdd));
    }
    return _mm256_permute2f128_ps(quads[0], quads[1], 0x20) + _mm256_permute2f128_ps(quads[0], quads[1], 0x31);
}

inline void transpose(Vec (&x)[LANES]) {
    Vec quads[LANES];  // of each four rows: their columns i, i + 4
    for (int i = 0; i < LANES; i += 4) {
        const __m256d low_ab = _mm256_castps_pd(_mm256_unpacklo_ps(x[i], x[i + 1]));
        const __m256d high_ab = _mm256_castps_pd(_mm256_unpackhi_ps(x[i], x[i + 1]));
        const __m256d low_cd = _mm256_castps_pd(_mm256_unpacklo_ps(x[i + 2], x[i + 3]));
        const __m256d high_cd = _mm256_castps_pd(_mm256_unpackhi_ps(x[i + 2], x[i + 3]));
        quads[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(low_ab, low_cd));
        quads[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low_ab, low_cd));
        quads[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high_ab, high_cd));
        quads[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high_ab, high_cd));
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
}

#else

typedef float Vec __attribute__((vector_size(16)));
constexpr int LANES = 4;
constexpr int TILE_ROWS = 4;
constexpr int TILE_COLUMNS = 2;
constexpr int VALUE_ROWS = 2;

inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline Vec load(const bf16* p) { return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
template <class T> inline Vec load_partial(const T* p, int n) {
    Vec x = set1(0);
    for (int i = 0; i < n; i++) x[i] = to_float(p[i]);
    return x;
}
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
template <class F> inline Vec each(Vec x, F f) {
    for (int i = 0; i < LANES; i++) x[i] = f(x[i], i);
    return x;
}
inline Vec maximum(Vec a, Vec b) {  // the second of the two when one is NaN, as in the other variants
    return each(a, [&](float x, int i) { return x > b[i] ? x : b[i]; });
}
inline Vec round_to_int(Vec x) { return each(x, [](float y, int) { return __builtin_rintf(y); }); }
inline Vec zero_below(Vec x, Vec bound, Vec value) {
    return each(value, [&](float y, int i) { return x[i] < bound[i] ? 0.0f : y; });
}
inline Vec power_of_two(Vec n) {
    return each(n, [](float y, int) {
        const uint32_t word = y == y ? static_cast<uint32_t>(static_cast<int32_t>(y) + 127) << 23 : 0x7fc00000u;
        float result;
        std::memcpy(&result, &word, sizeof result);
        return result;
    });
}
inline float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float largest(Vec x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16* p, Vec x) {
    for (int i = 0; i < LANES; i++) p[i] = from_float<bf16>(x[i]);
}
template <class T> inline void store_partial(T* p, Vec x, int n) {
    for (int i = 0; i < n; i++) p[i] = from_float<T>(x[i]);
}
inline Vec sums(const Vec* x) { return Vec{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])}; }
inline void transpose(Vec (&x)[LANES]) {
    const Vec rows[LANES] = {x[0], x[1], x[2], x[3]};
    for (int i = 0; i < LANES; i++) x[i] = Vec{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
}

#endif

constexpr int64_t CACHE_LINE = 64;

// Asks memory for the lines of `size` bytes, into the L2 cache: far more of such requests are under way at a time than
// of those into the L1 (measured on Zen 4, where the latter gain nothing).
inline void prefetch(const void* start, int64_t size) {
    const char* bytes = static_cast<const char*>(start);
    for (int64_t i = 0; i < size; i += CACHE_LINE) __builtin_prefetch(bytes + i, 0, 2);
    asm volatile("");  // GCC drops calls of functions that do nothing else than prefetch
}

inline Vec zero() { return set1(0.0f); }

// e^x for x <= 88, within 2 units in the last place; exactly 0 below -87, NaN for NaN.
inline Vec exp(Vec x) {
    const Vec lowest = set1(-87.0f);
    const Vec clamped = maximum(lowest, x);
    const Vec n = round_to_int(clamped * set1(1.44269504f));
    // ln 2 in two parts, so that the remainder keeps its bits
    const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), clamped));
    Vec p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return zero_below(x, lowest, p * power_of_two(n));
}

// Two consecutive values of an inner product in every lane: how bf16 weights are multiplied.
#if defined(LORAPLEX_BF16_DOT)

using Pair = __m512bh;
inline Pair load_pairs(const bf16* p) { return (Pair)_mm512_loadu_si512(p); }
inline Pair load_pairs_partial(const bf16* p, int n) {
    return (Pair)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p);
}
inline Pair broadcast_pair(bf16 first, bf16 second) {
    return (Pair)_mm512_set1_epi32(static_cast<int>(first.bits | static_cast<uint32_t>(second.bits) << 16));
}
inline Pair broadcast_pair(const bf16* p) {
    int word;
    std::memcpy(&word, p, sizeof word);
    return (Pair)_mm512_set1_epi32(word);
}
inline Vec dot(Vec sum, Pair a, Pair b) { return _mm512_dpbf16_ps(sum, a, b); }

inline Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

// Pairs of one value from each row, in the order that is quickest; and sums in that order put right.
inline void interleave(Pair a, Pair b, Pair* pairs) {
    pairs[0] = (Pair)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    pairs[1] = (Pair)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}
inline void deinterleave(const Vec* x, Vec* halves) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    halves[0] = _mm512_permutex2var_ps(x[0], low, x[1]);
    halves[1] = _mm512_permutex2var_ps(x[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), x[1]);
}

#else

struct Pair {
    Vec first, second;
};
inline Pair load_pairs(const bf16* p) {
#if defined(LORAPLEX_AVX512)
    const __m512i words = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
#elif defined(LORAPLEX_AVX2)
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
#else
    Pair pair;
    for (int i = 0; i < LANES; i++) pair.first[i] = to_float(p[2 * i]), pair.second[i] = to_float(p[2 * i + 1]);
    return pair;
#endif
}
inline Pair broadcast_pair(bf16 first, bf16 second) { return {set1(to_float(first)), set1(to_float(second))}; }
inline Pair broadcast_pair(const bf16* p) { return broadcast_pair(p[0], p[1]); }
inline Vec dot(Vec sum, Pair a, Pair b) { return fma(a.second, b.second, fma(a.first, b.first, sum)); }

#endif

// How two rows of values are multiplied with each other along their length.
template <class A, class B> struct RowDot {
    static constexpr int WIDTH = LANES;
    struct Operand {
        Vec vec;
    };
    template <class T> static Operand load(const T* p) { return {loraplex::load(p)}; }
    template <class T> static Operand load_partial(const T* p, int n) { return {loraplex::load_partial(p, n)}; }
    static Vec dot(Vec sum, Operand a, Operand b) { return fma(a.vec, b.vec, sum); }
};

#if defined(LORAPLEX_BF16_DOT)
template <> struct RowDot<bf16, bf16> {
    static constexpr int WIDTH = 2 * LANES;
    using Operand = Pair;
    static Operand load(const bf16* p) { return load_pairs(p); }
    static Operand load_partial(const bf16* p, int n) { return load_pairs_partial(p, n); }
    static Vec dot(Vec sum, Operand a, Operand b) { return loraplex::dot(sum, a, b); }
};
#endif

}  // namespace loraplex
