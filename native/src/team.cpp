// See team.hpp.
#include "team.hpp"

#include <algorithm>
#include <thread>
#include <vector>

namespace rows {

namespace {

// As GCC calls it for a parallel block, with a function, its argument, and a number of threads.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

Parallel parallel = nullptr;

// How often a waiting thread looks before it leaves its core to others.
constexpr int PATIENCE = 2000;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace

void use_openmp(uint64_t start) { parallel = reinterpret_cast<Parallel>(start); }

void in_parallel(int threads, Part part, void *work) {
    if (threads <= 1) {
        part(work);
    } else if (parallel) {
        parallel(part, work, unsigned(threads), 0);
    } else {
        std::vector<std::thread> others;
        for (int i = 1; i < threads; ++i) others.emplace_back(part, work);
        part(work);
        for (std::thread &other : others) other.join();
    }
}

int Meeting::take(uint32_t phase, int count, int &first) {
    for (int looked = 0;; ++looked) {
        uint64_t now = ticket.load(std::memory_order_acquire);
        if (uint32_t(now >> 32) != phase) return 0;
        first = int(uint32_t(now));
        if (first < count) {
            const int taken = std::max(1, (count - first) / (2 * threads));
            if (ticket.compare_exchange_weak(now, now + taken, std::memory_order_acq_rel))
                return taken;
        } else {
            looked < PATIENCE ? pause() : std::this_thread::yield();
        }
    }
}

void Meeting::finish(uint32_t phase, int count, int taken) {
    if (done.fetch_add(taken, std::memory_order_acq_rel) + taken < count) return;
    done.store(0, std::memory_order_relaxed);
    ticket.store(uint64_t(phase + 1) << 32, std::memory_order_release);
}

}  // namespace rows
