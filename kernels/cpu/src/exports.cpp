// The C interface that `native.py` calls. Every function exists for float32 (`_f32`) and bfloat16 (`_bf16`).
#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "decoder.h"
#include "elementwise.h"
#include "linear.h"
#include "lora.h"
#include "row_maximum.h"
#include "team.h"

namespace loraplex {

// Values below which waking other threads costs more than they save.
constexpr int64_t SMALL = 16384;

template <class T, class F> void run_rows(int num_threads, int64_t num_rows, int64_t row_size, const F& f) {
    run_parallel(num_threads, num_rows * row_size < SMALL, [&](Team& team) { for_each_row(team, num_rows, f); });
}

}  // namespace loraplex

using namespace loraplex;

#pragma GCC visibility push(default)

extern "C" {

const char* loraplex_instruction_set() {
#if defined(LORAPLEX_BF16_DOT)
    return "AVX-512 with bf16 dot products";
#elif defined(LORAPLEX_AVX512)
    return "AVX-512";
#elif defined(LORAPLEX_AVX2)
    return "AVX2";
#else
    return "scalar";
#endif
}

}  // extern "C"

#define LORAPLEX_EXPORTS(T, SUFFIX)                                                                                    \
    extern "C" {                                                                                                       \
    int64_t packed_size_##SUFFIX(int64_t out_features, int64_t in_features) {                                          \
        return num_panels(out_features) * panel_size<T>(in_features);                                                  \
    }                                                                                                                  \
    void pack_##SUFFIX(int num_threads, const T* weight, T* panels, int64_t out_features, int64_t in_features) {       \
        run_parallel(num_threads, false,                                                                               \
                     [&](Team& team) { pack(team, weight, panels, out_features, in_features); });                      \
    }                                                                                                                  \
    void linear_##SUFFIX(int num_threads, const T* x, int64_t x_stride, const Linear* linear, T* y,                    \
                         int64_t num_rows) {                                                                           \
        run_parallel(num_threads, linear->in_features* linear->out_features < SMALL, [&](Team& team) {                 \
            multiply(team, x, x_stride, *linear, y, linear->out_features, num_rows);                                   \
        });                                                                                                            \
    }                                                                                                                  \
    void gather_rows_##SUFFIX(int num_threads, const Linear* linear, const int64_t* ids, int64_t num_rows, T* rows) {  \
        run_rows<T>(num_threads, num_rows, linear->in_features,                                                        \
                    [&](int64_t row) { unpack_row(*linear, ids[row], rows + row * linear->in_features); });            \
    }                                                                                                                  \
    void rms_norm_##SUFFIX(int num_threads, const T* x, int64_t x_stride, int64_t outer_stride, int64_t inner_rows,    \
                           const T* weight, float eps, T* output, int64_t num_rows, int64_t size) {                    \
        run_rows<T>(num_threads, num_rows, size, [&](int64_t row) {                                                    \
            const T* source = x + row / inner_rows * outer_stride + row % inner_rows * x_stride;                       \
            rms_norm_row(source, weight, eps, size, output + row * size);                                              \
        });                                                                                                            \
    }                                                                                                                  \
    void add_rms_norm_##SUFFIX(int num_threads, const T* x, const T* residual, const T* weight, float eps, T* total,   \
                               T* output, int64_t num_rows, int64_t size) {                                            \
        run_rows<T>(num_threads, num_rows, size, [&](int64_t row) {                                                    \
            add_row(x + row * size, residual + row * size, size, total + row * size);                                  \
            rms_norm_row(total + row * size, weight, eps, size, output + row * size);                                  \
        });                                                                                                            \
    }                                                                                                                  \
    void rotary_##SUFFIX(int num_threads, T* heads, const T* cosine, const T* sine, int64_t num_rows,                  \
                         int64_t num_heads, int64_t head_dim) {                                                        \
        run_rows<T>(num_threads, num_rows, num_heads* head_dim, [&](int64_t row) {                                     \
            for (int64_t head = 0; head < num_heads; head++)                                                           \
                rotate_head(heads + (row * num_heads + head) * head_dim, cosine + row * head_dim,                      \
                            sine + row * head_dim, head_dim);                                                          \
        });                                                                                                            \
    }                                                                                                                  \
    void silu_and_mul_##SUFFIX(int num_threads, const T* gate_up, T* output, int64_t num_rows, int64_t size) {         \
        run_rows<T>(num_threads, num_rows, size,                                                                       \
                    [&](int64_t row) { silu_and_mul_row(gate_up + row * 2 * size, size, output + row * size); });      \
    }                                                                                                                  \
    void store_kv_##SUFFIX(int num_threads, const T* key, const T* value, int64_t key_stride, int64_t value_stride,    \
                           T* key_cache, T* value_cache, const int64_t* slot_mapping, int64_t num_rows,                \
                           int64_t kv_stride) {                                                                        \
        run_rows<T>(num_threads, num_rows, kv_stride, [&](int64_t row) {                                               \
            store_token(key + row * key_stride, value + row * value_stride, key_cache, value_cache, slot_mapping[row], \
                        kv_stride);                                                                                    \
        });                                                                                                            \
    }                                                                                                                  \
    void row_maximum_##SUFFIX(int num_threads, const T* values, int64_t* places, bool* is_finite, int64_t num_rows,    \
                              int64_t size) {                                                                         \
        run_rows<T>(num_threads, num_rows, size, [&](int64_t row) {                                                    \
            row_maximum(values + row * size, size, places + row, is_finite + row);                                     \
        });                                                                                                            \
    }                                                                                                                  \
    void attention_##SUFFIX(int num_threads, const AttentionInput<T>* input, const HeadShape* shape,                   \
                            const Batch* batch, T* output) {                                                           \
        run_parallel(num_threads, false, [&](Team& team) {                                                             \
            attend(team, query_items(*batch, *shape, team.size()), *input, *shape, output,                             \
                   shape->num_heads* shape->head_dim);                                                                 \
        });                                                                                                            \
    }                                                                                                                  \
    void lora_##SUFFIX(int num_threads, const LoraJob<T>* job, const LoraBatch* batch, const LoraTable* table,         \
                       int32_t pool_type) {                                                                            \
        run_parallel(num_threads, false, [&](Team& team) {                                                             \
            with_lora(team, *job, *batch, *table, static_cast<PoolType>(pool_type), [&](const auto& lora) {            \
                lora.shrink();                                                                                         \
                team.finish_phase();                                                                                   \
                lora.expand();                                                                                         \
            });                                                                                                        \
        });                                                                                                            \
    }                                                                                                                  \
    void decoder_##SUFFIX(int num_threads, const Model* model, const Step* step, const Layer* layers,                  \
                          int64_t num_layers) {                                                                        \
        run_parallel(num_threads, false,                                                                               \
                     [&](Team& team) { Decoder<T>(team, *model, *step).run(layers, num_layers); });                    \
    }                                                                                                                  \
    }

LORAPLEX_EXPORTS(float, f32)
LORAPLEX_EXPORTS(bf16, bf16)

#pragma GCC visibility pop
