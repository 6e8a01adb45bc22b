// See team.hpp.
#include "team.hpp"

#include <thread>
#include <vector>

namespace rows {

namespace {

// As GCC calls it for a parallel block, with a function, its argument, and a number of threads.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Threads)();

Parallel parallel = nullptr;
Threads threads_here = nullptr;

// How often a waiting thread looks before it leaves its core to others.
constexpr int PATIENCE = 4000;

struct Call {
    Part part;
    void *work;
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace

void use_openmp(uint64_t start, uint64_t count) {
    parallel = reinterpret_cast<Parallel>(start);
    threads_here = reinterpret_cast<Threads>(count);
}

void in_parallel(int threads, Part part, void *work) {
    if (threads <= 1) {
        part(work, 1);
    } else if (parallel && threads_here) {
        Call call{part, work};
        // It may start fewer threads than it was asked for.
        parallel(
            [](void *given) {
                const Call &call = *static_cast<Call *>(given);
                call.part(call.work, threads_here());
            },
            &call, unsigned(threads), 0);
    } else {
        std::vector<std::thread> others;
        for (int i = 1; i < threads; ++i) others.emplace_back(part, work, threads);
        part(work, threads);
        for (std::thread &other : others) other.join();
    }
}

void Meeting::wait(int threads) {
    const uint32_t before = round.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
        arrived.store(0, std::memory_order_relaxed);
        next.store(0, std::memory_order_relaxed);
        round.store(before + 1, std::memory_order_release);
        return;
    }
    for (int looked = 0; round.load(std::memory_order_acquire) == before; ++looked)
        looked < PATIENCE ? pause() : std::this_thread::yield();
}

}  // namespace rows
