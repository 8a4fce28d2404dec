// Memory of one thread for one phase.
#pragma once

#include <cstdint>
#include <new>

#include "simd.h"

namespace loraplex {

// `size` values that start on a cache line, as they were left by whoever had the memory before.
template <class T> class Scratch {
public:
    explicit Scratch(int64_t size)
        : values_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t{CACHE_LINE}))) {}
    ~Scratch() { ::operator delete(values_, std::align_val_t{CACHE_LINE}); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    T* at(int64_t place) const { return values_ + place; }

private:
    T* const values_;
};

}  // namespace loraplex
