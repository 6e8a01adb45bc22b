// What is done to whole rows of logits, in vectors as wide as the processor's.
//
// passes.cpp is compiled once per width of vectors. What it uses of headers is static: a function
// that is shared could come from the widest, and run where no processor has such vectors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace passes {

constexpr size_t BLOCK = 64;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
// Weights below e^-30 of the largest add less to a sum than its rounding, however many they are.
constexpr float NEGLIGIBLE = -30;

struct Passes {
    // The largest logit of every block, into `maxima`; whether some logit is not a number.
    bool (*find_maxima)(const float *row, size_t size, float *maxima);
    // The sum of e^(x / divisor - top / divisor).
    double (*find_mass)(const float *row, size_t size, const float *maxima, float top,
                        float divisor);
    // Of a block: its warped logits that are at least `floor`, LOWEST for the others, and its places.
    void (*warp)(const float *block, size_t start, float divisor, float floor, float *scores,
                 uint32_t *places);
    // Of a block of candidates: their draws, which of them have noise that may lift them to
    // `wanted`, and whether any has.
    bool (*find_draws)(const float *scores, const uint32_t *tokens, uint64_t key, float wanted,
                       uint32_t *draws, uint8_t *may);
};

extern const Passes plain, avx2, avx512;

template <class To, class From>
static inline To as(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// e^x for x <= 0, to about two units of the last digit: 2^n e^r, r by the polynomial of Cephes.
template <class Number, class Bits>
static inline Number exponential(Number x) {
    constexpr float ROUND = 12582912;  // 1.5 * 2^23: adding it rounds to a whole number
    const Number least = Number{} - 87.0f;
    x = x < least ? least : x;
    const Number shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
    const Number r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Number y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * as<Number>((as<Bits>(shifted) << 23) + 0x3F800000u);
}

static inline double weight(float x) { return exponential<float, uint32_t>(x); }

// The block that begins at a place of a row; what a row lacks at its end is LOWEST.
static inline const float *block_of(const float *row, size_t size, size_t start, float *padded) {
    if (start + BLOCK <= size) return row + start;
    for (size_t i = 0; i < BLOCK; ++i) padded[i] = start + i < size ? row[start + i] : LOWEST;
    return padded;
}

}  // namespace passes
