// The threads that compute one forward: those of the OpenMP that torch runs with.
//
// A pool of our own would compete with torch's for the cores: a thread of a pool that has nothing to
// do spins for a while before it sleeps. So the core asks torch's OpenMP for its threads, by the
// address of the function with which compiled code starts a parallel block. Where there is none (a
// torch that was built without OpenMP), threads are started for each call.
#pragma once
#include <atomic>
#include <cstdint>

namespace rows {

// Computes one thread's part of some work. `threads` is their number, which all of them get.
typedef void (*Part)(void *work, int threads);

// Run `part` in several threads at once, and wait for all of them.
void in_parallel(int threads, Part part, void *work);
// The functions of an OpenMP library; zeros for none.
void use_openmp(uint64_t parallel, uint64_t threads);

// Where the threads of one piece of work share it out and wait for each other.
struct Meeting {
    std::atomic<int> next{0}, arrived{0};
    std::atomic<uint32_t> round{0};

    // Wait until all threads are here.
    void wait(int threads);
};

// One thread's view of a Meeting.
struct Team {
    Meeting &meeting;
    int threads;

    // Call `work(i)` for every i below `count` in some thread, and wait for all. A thread that is
    // done takes the next, so that one whose core is busy with something else does less.
    template <class Work>
    inline __attribute__((always_inline)) void each(int count, Work work) const {
        for (int i; (i = meeting.next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
        meeting.wait(threads);
    }
};

}  // namespace rows
