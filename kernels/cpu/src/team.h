// Threads that share the items of a phase and wait for each other between phases.
#pragma once

#include <atomic>
#include <cstdint>

#include <omp.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace loraplex {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// One parallel region. Items are claimed one by one, so a thread that lost its core leaves the rest to the others;
// who computes an item changes nothing in its result.
class Team {
public:
    // Called by every thread of a region first. It may get fewer threads than it asked for: the team is what came.
    void join(int size) { size_.store(size, std::memory_order_relaxed); }

    int size() const { return size_.load(std::memory_order_relaxed); }

    // The next item of this phase; each is given out once. A phase may have two lists of items.
    int64_t claim(int list = 0) { return next_[list].fetch_add(1, std::memory_order_relaxed); }

    // Ends the phase: everything written in it is visible afterwards, and items count from 0 again.
    //
    // A barrier is due in microseconds, so a thread looks again for about 20 of them, and then sleeps: a thread whose
    // partner lost its core must not burn the core that the partner waits for.
    void finish_phase() {
        const uint32_t phase = phase_.load();
        if (arrived_.fetch_add(1) + 1 == size_.load(std::memory_order_relaxed)) {
            arrived_.store(0);
            for (auto& next : next_) next.store(0);
            phase_.store(phase + 1);
            if (sleepers_.load() > 0) wake();
            return;
        }
        for (int i = 0; i < SPINS; i++) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            pause_briefly();
        }
        sleepers_.fetch_add(1);
        while (phase_.load() == phase) sleep(phase);
        sleepers_.fetch_sub(1);
    }

private:
    static constexpr int SPINS = 1000;

#if defined(__linux__)
    void sleep(uint32_t phase) { syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake() {}
#endif

    std::atomic<int> size_{1};
    alignas(64) std::atomic<int64_t> next_[2] = {};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> sleepers_{0};
};

// Runs `work(team)` on every thread. Work not worth waking anybody for stays on the caller.
template <class Work> void run_parallel(int num_threads, bool is_small, const Work& work) {
    Team team;
    if (num_threads <= 1 || is_small || omp_in_parallel()) {
        work(team);
        return;
    }
#pragma omp parallel num_threads(num_threads)
    {
        team.join(omp_get_num_threads());
        work(team);
    }
}

}  // namespace loraplex
