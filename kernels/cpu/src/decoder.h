// Decoder layers one after another in one parallel region: the same functions as the single calls, with barriers of
// our own instead of a wake-up for each of them.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "lora.h"
#include "team.h"

namespace loraplex {

enum { Q, K, V, O, GATE, UP, DOWN, NUM_PROJECTIONS };

struct Layer {
    const void* input_norm;
    const void* post_attention_norm;
    const void* q_norm;  // both null without
    const void* k_norm;
    Linear qkv;
    Linear o;
    Linear gate_up;
    Linear down;
    void* key_cache;
    void* value_cache;
    LoraSlice lora[NUM_PROJECTIONS];
    int64_t window;
    float scale;
    int32_t has_rope;
};

struct Model {
    HeadShape heads;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t slot_rank;
    float eps;
    PoolType pool_type;
};

struct Step {
    int64_t num_tokens;
    void* residual;    // [num_tokens, hidden_size]: in, the embeddings; out, the sum up to the last layer's attention
    void* hidden;      // out: what the last layer adds to it
    void* normed;      // scratch, rows of hidden_size
    void* qkv;         // scratch, rows of q, k and v together
    void* attended;    // scratch, rows of q
    void* gate_up;     // scratch, rows of 2 * intermediate_size
    void* activated;   // scratch, rows of intermediate_size
    float* shrunk;     // scratch of LoRA
    const void* cosine;  // [num_tokens, head_dim]
    const void* sine;
    const int64_t* slot_mapping;  // [num_tokens]
    Batch batch;
    LoraBatch lora;  // no chunks: every row is the base's
    LoraTable attention_table;
    LoraTable mlp_table;
};

template <class T> class Decoder {
public:
    Decoder(Team& team, const Model& model, const Step& step)
        : team_(team), model_(model), step_(step), query_items_(query_items(step.batch, model.heads, team.size())) {}

    void run(const Layer* layers, int64_t num_layers) const {
        for (int64_t i = 0; i < num_layers; i++) {
            add_and_norm(i > 0, layers[i].input_norm);
            attend_layer(layers[i]);
            add_and_norm(true, layers[i].post_attention_norm);
            mlp(layers[i]);
        }
    }

private:
    // residual += hidden (for all but the first input), normed = norm(residual)
    void add_and_norm(bool has_hidden, const void* weight) const {
        const int64_t size = model_.hidden_size;
        for_each_row(team_, step_.num_tokens, [&](int64_t row) {
            T* residual = at(step_.residual, row, size);
            if (has_hidden) add_row(at(step_.hidden, row, size), residual, size, residual);
            rms_norm_row(residual, static_cast<const T*>(weight), model_.eps, size, at(step_.normed, row, size));
        });
        team_.finish_phase();
    }

    void attend_layer(const Layer& layer) const {
        const HeadShape& heads = model_.heads;
        const int64_t q_size = heads.num_heads * heads.head_dim, stride = q_size + 2 * heads.kv_stride();
        project(layer.qkv, step_.normed, model_.hidden_size, step_.qkv, stride, &layer.lora[Q], 3,
                step_.attention_table);
        for_each_row(team_, step_.num_tokens, [&](int64_t row) { prepare_heads(layer, row, at(step_.qkv, row, stride)); });
        team_.finish_phase();
        const AttentionInput<T> input{static_cast<const T*>(step_.qkv), stride, static_cast<const T*>(layer.key_cache),
                                      static_cast<const T*>(layer.value_cache), layer.scale, layer.window};
        attend(team_, query_items_, input, heads, static_cast<T*>(step_.attended), q_size);
        team_.finish_phase();
        project(layer.o, step_.attended, q_size, step_.hidden, model_.hidden_size, &layer.lora[O], 1,
                step_.attention_table);
    }

    // Norms, turns and stores the heads of one token.
    void prepare_heads(const Layer& layer, int64_t row, T* qkv) const {
        const HeadShape& heads = model_.heads;
        const T* cosine = at(step_.cosine, row, heads.head_dim);
        const T* sine = at(step_.sine, row, heads.head_dim);
        for (int64_t head = 0; head < heads.num_heads + heads.num_kv_heads; head++) {
            const void* norm = head < heads.num_heads ? layer.q_norm : layer.k_norm;
            T* values = qkv + head * heads.head_dim;
            if (norm != nullptr)
                rms_norm_row(values, static_cast<const T*>(norm), model_.eps, heads.head_dim, values);
            if (layer.has_rope) rotate_head(values, cosine, sine, heads.head_dim);
        }
        const T* key = qkv + heads.num_heads * heads.head_dim;
        store_token(key, key + heads.kv_stride(), static_cast<T*>(layer.key_cache), static_cast<T*>(layer.value_cache),
                    step_.slot_mapping[row], heads.kv_stride());
    }

    void mlp(const Layer& layer) const {
        const int64_t size = model_.intermediate_size;
        project(layer.gate_up, step_.normed, model_.hidden_size, step_.gate_up, 2 * size, &layer.lora[GATE], 2,
                step_.mlp_table);
        for_each_row(team_, step_.num_tokens, [&](int64_t row) {
            silu_and_mul_row(at(step_.gate_up, row, 2 * size), size, at(step_.activated, row, size));
        });
        team_.finish_phase();
        project(layer.down, step_.activated, size, step_.hidden, model_.hidden_size, &layer.lora[DOWN], 1,
                step_.mlp_table);
    }

    void project(const Linear& linear, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                 const LoraSlice* slices, int64_t num_slices, const LoraTable& table) const {
        const auto base = [&] {
            multiply(team_, static_cast<const T*>(x), x_stride, linear, static_cast<T*>(y), y_stride, step_.num_tokens);
            team_.finish_phase();
        };
        if (step_.lora.num_chunks == 0 || table.width == 0) return base();
        const LoraJob<T> job{static_cast<const T*>(x), x_stride,   linear.in_features, static_cast<T*>(y), y_stride,
                             slices,                   num_slices, model_.slot_rank,   step_.shrunk};
        with_lora(team_, job, step_.lora, table, model_.pool_type, [&](const auto& lora) {
            lora.shrink();
            base();
            lora.expand();
            team_.finish_phase();
        });
    }

    static T* at(void* base, int64_t row, int64_t size) { return static_cast<T*>(base) + row * size; }
    static const T* at(const void* base, int64_t row, int64_t size) { return static_cast<const T*>(base) + row * size; }

    Team& team_;
    const Model& model_;
    const Step& step_;
    const std::vector<QueryItem> query_items_;
};

}  // namespace loraplex
