// The keyed Gumbel noise of engine/sampling.py, to the same float32: see `gumbel` there.
#pragma once
#include <cmath>
#include <cstdint>

namespace noise {

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;
constexpr uint64_t FIRST = 0xBF58476D1CE4E5B9u, SECOND = 0x94D049BB133111EBu;
constexpr int BITS = 24;
constexpr float LARGEST = 4542609 * 0x1p-18f;  // no noise is larger: 17.3

// The number of that index that the generator SplitMix64 gives from a state.
static inline uint64_t split(uint64_t state, uint64_t number) {
    uint64_t word = state + (number + 1) * GAMMA;
    word = (word ^ (word >> 30)) * FIRST;
    word = (word ^ (word >> 27)) * SECOND;
    return word ^ (word >> 31);
}

// The state that the noise of one absolute position of one seed begins from.
static inline uint64_t key(uint64_t seed, uint64_t position) { return split(split(seed, 0), position); }

// A token's draw, of BITS bits.
static inline uint32_t bits(uint64_t key, uint64_t token) {
    return static_cast<uint32_t>(split(key, token) >> (64 - BITS));
}

// The noise that a draw stands for; it grows with it.
static inline float of_bits(uint32_t bits) {
    const double share = (bits + 0.5) * 0x1p-24;
    return static_cast<float>(std::nearbyint(-std::log(-std::log(share)) * 0x1p18) * 0x1p-18);
}

// A token's noise.
static inline float gumbel(uint64_t key, uint64_t token) { return of_bits(bits(key, token)); }

}  // namespace noise
