// Memory of one thread for one phase, and huge pages for what is read again and again.
#pragma once

#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

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

// Asks for huge pages where whole ones fit and nothing was written yet. A stream of weights through pages of 4 KiB
// reaches little more than half of the memory's bandwidth on one core: prefetching ends with each page.
inline void use_huge_pages(void* start, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = uintptr_t{1} << 21;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(start) + size) / page * page;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // without them: as before
#endif
}

}  // namespace loraplex
