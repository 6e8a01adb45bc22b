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

// Computes one thread's part of some work.
typedef void (*Part)(void *work);

// Run `part` in several threads at once, and wait for all of them.
void in_parallel(int threads, Part part, void *work);
// The function of an OpenMP library; zero for none.
void use_openmp(uint64_t parallel);

// Where the threads of one piece of work share it out, phase after phase. A phase is over when all of
// its items are done: a thread whose core is busy with something else, and which has taken none, keeps
// nobody waiting. It finds the phase over and goes on to the next.
//
// A thread takes many neighbouring items at first and few at the end: it reads far ahead in one
// place of the memory, and the last ones are shared out evenly.
struct Meeting {
    const int threads;
    alignas(64) std::atomic<uint64_t> ticket{0};  // the phase, and its next item
    alignas(64) std::atomic<int> done{0};

    explicit Meeting(int threads) : threads(threads) {}
    // Take items of a phase, the first of which is put into `first`; 0 once the phase is over.
    int take(uint32_t phase, int count, int &first);
    void finish(uint32_t phase, int count, int taken);
};

// One thread's view of a Meeting.
struct Team {
    Meeting &meeting;
    mutable uint32_t phase = 0;

    explicit Team(Meeting &meeting) : meeting(meeting) {}

    // Call `work(i)` for every i below `count`, each in some thread; returns when all are done.
    template <class Work>
    inline __attribute__((always_inline)) void each(int count, Work work) const {
        if (count <= 0) return;  // no item would end the phase
        for (int first, taken; (taken = meeting.take(phase, count, first)) > 0;
             meeting.finish(phase, count, taken))
            for (int i = first; i < first + taken; ++i) work(i);
        ++phase;
    }
};

}  // namespace rows
