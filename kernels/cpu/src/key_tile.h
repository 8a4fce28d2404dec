// A stretch of a sequence's keys: where they are in the paged cache, and packed as the panels of a product.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"
#include "tile.h"

namespace loraplex {

constexpr int KEY_TILE = 96;
static_assert(KEY_TILE % PANEL == 0 && PANEL % LANES == 0, "a tile is whole panels, a panel whole vectors");

struct HeadShape {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;

    int64_t group_size() const { return num_heads / num_kv_heads; }
    int64_t kv_stride() const { return num_kv_heads * head_dim; }  // from a token's keys to the next one's
};

// The places of a tile's keys in the cache, in elements.
struct KeyTile {
    int from = 0;  // the keys [from, to) of the tile are there
    int to = 0;
    int64_t offset[KEY_TILE];

    KeyTile() = default;

    // The tile at position `start`, cut to the positions [begin, end).
    KeyTile(const int32_t* blocks, const HeadShape& shape, int64_t start, int64_t begin, int64_t end)
        : from(static_cast<int>(std::max(begin - start, int64_t{0}))),
          to(static_cast<int>(std::min(end - start, int64_t{KEY_TILE}))) {
        int64_t block = (start + from) / shape.block_size, place = (start + from) % shape.block_size;
        for (int key = from; key < to; key++) {
            offset[key] = (blocks[block] * shape.block_size + place) * shape.kv_stride();
            if (++place == shape.block_size) block++, place = 0;
        }
    }

    // The nearest key that is there.
    int within(int key) const { return std::min(std::max(key, from), to - 1); }
};

// A later tile's rows of one head, asked for a few at a time while the tile `now` is read: requests must come in between
// other work, since a burst of them waits for itself.
template <class T> class Upcoming {
public:
    Upcoming(const T* cache, int64_t head_dim, const KeyTile& now, const KeyTile& later)
        : cache_(cache),
          size_(head_dim * sizeof(T)),
          later_(later),
          begin_(now.from),
          per_key_((later.to - later.from + now.to - now.from - 1) / (now.to - now.from)) {}

    // Due when `count` keys of the tile in work are read, from `key` on.
    __attribute__((always_inline)) void ask(int key, int count) const {
        const int first = later_.from + (key - begin_) * per_key_;
        const int last = std::min(first + count * per_key_, later_.to);
        for (int i = std::max(first, later_.from); i < last; i++) prefetch(cache_ + later_.offset[i], size_);
    }

private:
    const T* const cache_;
    const int64_t size_;
    const KeyTile& later_;
    const int begin_;
    const int per_key_;
};

// LANES steps of a product for each of LANES columns, where `size` values are left of each.
template <class T> inline Vec load_steps(const T* p, int64_t size) {
    constexpr int64_t whole = LANES * Packing<T>::DEPTH;
    Vec steps = zero();
    if (size >= whole) {
        std::memcpy(&steps, p, sizeof steps);
    } else {
        std::memcpy(&steps, p, size * sizeof(T));
    }
    return steps;
}

// One head's keys of a tile -> panels. Columns of keys that are not there repeat one that is, or are left as they were.
template <class T>
void pack_keys(const T* cache, const KeyTile& tile, int64_t head_dim, const Upcoming<T>& upcoming, T* panels) {
    constexpr int64_t depth = Packing<T>::DEPTH;
    const int64_t steps = (head_dim + depth - 1) / depth;
    for (int first = tile.from / LANES * LANES; first < tile.to; first += LANES) {
        const T* rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = cache + tile.offset[tile.within(first + i)];
        upcoming.ask(first, LANES);
        T* target = panels + first / PANEL * panel_size<T>(head_dim) + first % PANEL * depth;
        for (int64_t step = 0; step < steps; step += LANES) {
            Vec words[LANES];
            for (int i = 0; i < LANES; i++) words[i] = load_steps(rows[i] + step * depth, head_dim - step * depth);
            transpose(words);
            const int64_t count = std::min<int64_t>(LANES, steps - step);
            for (int64_t i = 0; i < count; i++)
                std::memcpy(target + (step + i) * PANEL * depth, &words[i], sizeof words[i]);
        }
    }
}

}  // namespace loraplex
