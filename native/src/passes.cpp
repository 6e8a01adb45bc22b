// See passes.hpp. LANES numbers are computed with at a time; the passes get the name LEVEL.
#include "passes.hpp"

#include "noise.hpp"

#ifndef LEVEL
#define LEVEL plain
#if defined(__GNUC__)
#define LANES 4
#else
#define LANES 1
#endif
#endif

namespace passes {

namespace {

#if LANES > 1
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
#else
typedef float Lanes;
typedef uint32_t Words;
#endif

inline Lanes load(const float *from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

// Of all lanes, by halves.
template <class Pick>
inline float folded(const Lanes &lanes, Pick pick) {
    float values[LANES];
    std::memcpy(values, &lanes, sizeof values);
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; ++i) values[i] = pick(values[i], values[i + half]);
    return values[0];
}

inline bool any(const Words &lanes) {
    uint32_t words[LANES], found = 0;
    std::memcpy(words, &lanes, sizeof words);
    for (uint32_t word : words) found |= word;
    return found;
}

bool find_maxima(const float *row, size_t size, float *maxima) {
    Words odd = {};
    float padded[BLOCK];
    for (size_t start = 0; start < size; start += BLOCK) {
        const float *block = block_of(row, size, start, padded);
        Lanes largest = load(block);
        odd |= (Words)(largest != largest);
        for (size_t i = LANES; i < BLOCK; i += LANES) {
            const Lanes x = load(block + i);
            odd |= (Words)(x != x);
            largest = x > largest ? x : largest;
        }
        maxima[start / BLOCK] = folded(largest, [](float a, float b) { return a > b ? a : b; });
    }
    return any(odd);
}

double find_mass(const float *row, size_t size, const float *maxima, float top, float divisor) {
    const float peak = top / divisor;
    float padded[BLOCK];
    double mass = 0;
    for (size_t start = 0; start < size; start += BLOCK) {
        if (maxima[start / BLOCK] / divisor - peak < NEGLIGIBLE) continue;
        const float *block = block_of(row, size, start, padded);
        Lanes sum = {};
        for (size_t i = 0; i < BLOCK; i += LANES) {
            Lanes x = load(block + i);
            if (divisor != 1) x = x / divisor;
            sum += exponential<Lanes, Words>(x - peak);
        }
        mass += folded(sum, [](float a, float b) { return a + b; });
    }
    return mass;
}

void warp(const float *__restrict block, size_t start, float divisor, float floor,
          float *__restrict scores, uint32_t *__restrict places) {
    for (size_t i = 0; i < BLOCK; ++i) {
        const float score = block[i] / divisor;
        scores[i] = score < floor ? LOWEST : score;
        places[i] = uint32_t(start + i);
    }
}

// Whether a draw may lift a score to `wanted`. -log(1 - u) is more than the noise and easily bounded:
// the bits of a float, read as a number, are below its logarithm.
inline uint8_t may_lift(uint32_t draw, float score, float wanted) {
    const float rest = static_cast<float>(int32_t((1u << noise::BITS) - 1 - draw));
    const float log2 = static_cast<float>(as<int32_t>(rest)) * 0x1p-23f - 127;
    return score + (noise::BITS - log2) * 0.693147181f >= wanted;
}

bool find_draws(const float *__restrict scores, const uint32_t *__restrict tokens, uint64_t key,
                float wanted, uint32_t *__restrict draws, uint8_t *__restrict may) {
    uint8_t found = 0;
    for (size_t i = 0; i < BLOCK; ++i) draws[i] = noise::bits(key, tokens[i]);
    for (size_t i = 0; i < BLOCK; ++i) found |= may[i] = may_lift(draws[i], scores[i], wanted);
    return found;
}

}  // namespace

const Passes LEVEL{find_maxima, find_mass, warp, find_draws};

}  // namespace passes
