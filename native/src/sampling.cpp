// The choice of engine/sampling.py: the same token for every row, in about two passes over it.
//
// The row is divided into blocks whose largest logits are found first. What follows looks into the
// few blocks that matter: tokens that no cut drops and that can win, which are those not more than
// noise::LARGEST below the best score so far. What decides is computed as in Python, operation by
// operation. Only the mass of a nucleus is not, as its exponentials may differ in the last digits:
// where that could matter, no token is told, and Python decides.
#include "module.hpp"
#include "noise.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

namespace nb = nanobind;

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#endif
#ifndef CLONES
#define CLONES
#endif

namespace {

#if defined(__GNUC__) && !defined(STRATA_NO_VECTORS)
constexpr size_t LANES = 16;
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
#define INLINE inline __attribute__((always_inline))
#else
constexpr size_t LANES = 1;
typedef float Lanes;
typedef uint32_t Words;
#define INLINE inline
#endif

constexpr size_t BLOCK = 64;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
// Weights below e^-30 of the largest add less to a sum than its rounding, however many they are.
constexpr float NEGLIGIBLE = -30;
// How far a mass may be off, as a share: ours, and one that was computed elsewhere.
constexpr double OWN_ERROR = 4e-6, GIVEN_ERROR = 4e-5;

template <class To, class From>
INLINE To as(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

INLINE Lanes load(const float *from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

// Of all lanes, by halves.
template <class Pick>
INLINE float folded(const Lanes &lanes, Pick pick) {
    float values[LANES];
    std::memcpy(values, &lanes, sizeof values);
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; ++i) values[i] = pick(values[i], values[i + half]);
    return values[0];
}

// The block that begins at a place of a row; what a row lacks at its end is LOWEST.
INLINE const float *block_of(const float *row, size_t size, size_t start, float *padded) {
    if (start + BLOCK <= size) return row + start;
    std::fill(padded, padded + BLOCK, LOWEST);
    std::copy(row + start, row + size, padded);
    return padded;
}

// e^x for x <= 0, to about two units of the last digit: 2^n e^r, r by the polynomial of Cephes.
template <class Number, class Bits>
INLINE Number exponential(Number x) {
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

inline double weight(float x) { return exponential<float, uint32_t>(x); }

// The largest logit of every block, into `maxima`; whether some logit is not a number.
CLONES bool find_maxima(const float *row, size_t size, float *maxima) {
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
    return folded(as<Lanes>(odd), [](float a, float b) {
               return as<float>(as<uint32_t>(a) | as<uint32_t>(b));
           }) != 0;
}

// The sum of e^(x / divisor - top / divisor), always in the same order.
CLONES double find_mass(const float *row, size_t size, const float *maxima, float top,
                        float divisor) {
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

// Of a block: its warped logits that are at least `floor`, LOWEST for the others, and its places.
CLONES void warp(const float *__restrict block, size_t start, float divisor, float floor,
                 float *__restrict scores, uint32_t *__restrict places) {
    for (size_t i = 0; i < BLOCK; ++i) {
        const float score = block[i] / divisor;
        scores[i] = score < floor ? LOWEST : score;
        places[i] = uint32_t(start + i);
    }
}

// Of a block of candidates: their draws, and whether their noise may lift them to `wanted`.
// -log(1 - u) is more than the noise and easily bounded: the bits of a float, read as a number,
// are below its logarithm.
CLONES bool find_draws(const float *__restrict scores, const uint32_t *__restrict tokens,
                       uint64_t key, float wanted, uint32_t *__restrict draws,
                       uint8_t *__restrict may) {
    for (size_t i = 0; i < BLOCK; ++i) draws[i] = noise::bits(key, tokens[i]);
    uint8_t any = 0;
    for (size_t i = 0; i < BLOCK; ++i) {
        const float rest = static_cast<float>(int32_t((1u << noise::BITS) - 1 - draws[i]));
        const float log2 = static_cast<float>(as<int32_t>(rest)) * 0x1p-23f - 127;
        may[i] = scores[i] + (noise::BITS - log2) * 0.693147181f >= wanted;
        any |= may[i];
    }
    return any;
}

struct Row {
    const float *logits;
    size_t size;
    const int64_t *names;  // the tokens of the logits, null where they are 0, 1, 2, ...
    float top;
    size_t first;  // where the largest logit is
    std::vector<float> maxima;

    uint64_t token(size_t place) const { return names ? uint64_t(names[place]) : place; }
};

// The places of a row that are left, in their order, with their warped logits.
struct Candidates {
    std::vector<float> scores;
    std::vector<uint32_t> places;

    // Those whose warped logit is at least `floor`.
    void collect(const Row &row, float divisor, float floor) {
        scores.clear(), places.clear();
        for (size_t start = 0; start < row.size; start += BLOCK) {
            if (row.maxima[start / BLOCK] / divisor < floor) continue;
            for (size_t i = start; i < std::min(start + BLOCK, row.size); ++i) {
                const float score = row.logits[i] / divisor;
                if (score >= floor) scores.push_back(score), places.push_back(uint32_t(i));
            }
        }
    }

    void keep(float floor) {
        size_t kept = 0;
        for (size_t i = 0; i < scores.size(); ++i)
            if (scores[i] >= floor) scores[kept] = scores[i], places[kept++] = places[i];
        scores.resize(kept), places.resize(kept);
    }

    double mass(float peak) const {
        double mass = 0;
        for (float score : scores) mass += weight(score - peak);
        return mass;
    }
};

float kth_largest(std::vector<float> &values, size_t k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    return values[k - 1];
}

// The smallest of the fewest largest scores that have the mass together; LOWEST where all have
// not. The part in which it lies is halved again and again.
float nucleus_floor(std::vector<float> scores, float peak, double wanted) {
    size_t low = 0, high = scores.size();
    double above = 0;
    while (low < high) {
        const float pivot = scores[low + (high - low) / 2];
        const auto begin = scores.begin() + low, end = scores.begin() + high;
        const auto equal = std::partition(begin, end, [=](float score) { return score > pivot; });
        const auto below = std::partition(equal, end, [=](float score) { return score == pivot; });
        double larger = 0;
        for (auto score = begin; score != equal; ++score) larger += weight(*score - peak);
        if (above + larger >= wanted && equal != begin) {
            high = equal - scores.begin();
            continue;
        }
        above += larger + double(below - equal) * weight(pivot - peak);
        if (above >= wanted) return pivot;
        low = below - scores.begin();
    }
    return LOWEST;
}

struct Sampler {
    float temperature;
    size_t top_k;
    double top_p;
    float log_min_p;

    bool counts(const Row &row) const { return 0 < top_k && top_k < row.size; }
};

// A score that is surely below that of any token that can win, where one has `score` already.
float within_reach(float score) {
    return score - noise::LARGEST - 4e-7f * (std::fabs(score) + 2 * noise::LARGEST);
}

// What is known of the choice so far: the place with the largest sum of warped logit and noise, the
// first of equals, among those that were looked at.
struct Best {
    const Row &row;
    const uint64_t key;
    size_t place;
    float score;

    // Looks at up to BLOCK places, which have these warped logits and tokens.
    template <class Place>
    void look(const float *scores, const uint32_t *tokens, size_t count, Place place_of) {
        uint32_t draws[BLOCK];
        uint8_t may[BLOCK];
        const float wanted = score - 1e-3f - 1e-6f * std::fabs(score);
        if (!find_draws(scores, tokens, key, wanted, draws, may)) return;
        for (size_t i = 0; i < count; ++i) {
            if (!may[i]) continue;
            const float sum = scores[i] + noise::of_bits(draws[i]);
            if (sum > score || (sum == score && tokens[i] < row.token(place)))
                score = sum, place = place_of(i);
        }
    }

    void look(const Candidates &left) {
        float scores[BLOCK];
        uint32_t tokens[BLOCK] = {};
        for (size_t start = 0; start < left.scores.size(); start += BLOCK) {
            const size_t count = std::min(BLOCK, left.scores.size() - start);
            std::fill(scores, scores + BLOCK, LOWEST);
            std::copy_n(left.scores.begin() + start, count, scores);
            for (size_t i = 0; i < count; ++i)
                tokens[i] = uint32_t(row.token(left.places[start + i]));
            look(scores, tokens, count, [&](size_t i) { return left.places[start + i]; });
        }
    }

    // Looks at the whole row, down to a warped logit.
    void look(float divisor, float floor) {
        float scores[BLOCK], padded[BLOCK];
        uint32_t tokens[BLOCK] = {};
        for (size_t start = 0; start < row.size; start += BLOCK) {
            if (row.maxima[start / BLOCK] / divisor < std::max(floor, within_reach(score))) continue;
            const size_t count = std::min(BLOCK, row.size - start);
            const float *block = block_of(row.logits, row.size, start, padded);
            warp(block, start, divisor, floor, scores, tokens);
            if (row.names) std::copy_n(row.names + start, count, tokens);
            look(scores, tokens, count, [&](size_t i) { return start + i; });
        }
    }
};

// The lowest warped logit that the cuts leave (`floor`), and from where on none is dropped for sure.
struct Floors {
    float floor = LOWEST, sure = LOWEST;
    bool known = true;
};

// Applies top-k and top-p: what is left of those that they count, and in which `reach` the choice
// is. `mass` is that of the warped logits, 0 to have it computed. The floors are not known where
// they depend on what is not above `rest`.
Floors cut(const Row &row, const Sampler &sampler, float reach, float rest, double mass,
           Candidates &left) {
    const float divisor = sampler.temperature, peak = row.top / divisor;
    double error = OWN_ERROR;
    Floors found;
    if (sampler.counts(row)) {
        std::vector<float> values = row.maxima;
        // The k-th largest maximum is no larger than the k-th largest logit.
        const bool enough = sampler.top_k <= values.size();
        left.collect(row, divisor, enough ? kth_largest(values, sampler.top_k) / divisor : LOWEST);
        values = left.scores;
        found.floor = kth_largest(values, sampler.top_k);
        left.keep(found.floor);
        found.known = sampler.top_p >= 1 || found.floor > rest || rest == LOWEST;
        mass = left.mass(peak);
    } else if (mass > 0) {
        error = GIVEN_ERROR;
    } else {
        mass = find_mass(row.logits, row.size, row.maxima.data(), row.top, divisor);
    }
    if (sampler.top_p < 1) {
        const double loose = mass * (sampler.top_p + error), tight = mass * (sampler.top_p - error);
        // Most nuclei are a few tokens near the largest.
        for (float depth = 2; !sampler.counts(row); depth *= 1.5f) {
            left.collect(row, divisor, std::max(peak - depth, reach));
            if (peak - depth <= reach || left.mass(peak) > loose) break;
        }
        found.floor = std::max(found.floor, nucleus_floor(left.scores, peak, loose));
        left.keep(found.floor);
        found.sure = nucleus_floor(left.scores, peak, tight);
    }
    return found;
}

struct Choice {
    int64_t place;  // -1 where Python has to decide
    float top;
    double mass;
    float score;
};

// The choice above temperature 0. What is not in the row is not above the logit `rest`: where that
// might matter, Python has to decide.
void choose_warped(const Row &row, const Sampler &sampler, uint64_t key, float rest, double mass,
                   Choice &found) {
    thread_local Candidates left;
    const float divisor = sampler.temperature, peak = row.top / divisor;
    const float least = peak + sampler.log_min_p;
    rest /= divisor;
    Best best{row, key, row.first, peak + noise::gumbel(key, row.token(row.first))};
    Floors floors;
    if (sampler.counts(row) || sampler.top_p < 1) {
        const float reach = within_reach(best.score);
        floors = cut(row, sampler, reach, rest, mass, left);
        left.keep(std::max(least, reach));
        best.look(left);
    } else {
        best.look(divisor, least);
    }
    const bool inside = floors.known && row.logits[best.place] / divisor >= floors.sure;
    const bool cut_off = std::max(floors.floor, least) > rest;
    found.score = best.score;
    if (inside && (cut_off || !(best.score <= rest + noise::LARGEST)))
        found.place = int64_t(best.place);
}

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Choice find_choice(const float *logits, size_t size, const int64_t *names, const Sampler &sampler,
                   uint64_t seed, uint64_t position, double mass, float rest) {
    thread_local Row row;
    row.logits = logits, row.size = size, row.names = names;
    row.maxima.resize((size + BLOCK - 1) / BLOCK);
    Choice found{-1, 0, 0, 0};
    if (size == 0 || find_maxima(logits, size, row.maxima.data())) return found;
    const auto block = std::max_element(row.maxima.begin(), row.maxima.end());
    row.top = *block;
    const float *from = logits + (block - row.maxima.begin()) * BLOCK;
    row.first = std::find(from, logits + size, row.top) - logits;
    const float peak = sampler.temperature > 0 ? row.top / sampler.temperature : row.top;
    if (!std::isfinite(peak)) return found;
    found.top = found.score = row.top;
    found.mass = find_mass(logits, size, row.maxima.data(), row.top, 1);
    if (sampler.temperature > 0)
        choose_warped(row, sampler, noise::key(seed, position), rest, mass, found);
    else
        found.place = int64_t(row.first);
    return found;
}

nb::tuple choose(Logits logits, float temperature, size_t top_k, double top_p, float log_min_p,
                 uint64_t seed, uint64_t position, std::optional<Tokens> tokens, double mass,
                 float rest) {
    const Sampler sampler{temperature, top_k, top_p, log_min_p};
    const int64_t *names = tokens ? tokens->data() : nullptr;
    const size_t size = tokens ? std::min(tokens->shape(0), logits.shape(0)) : logits.shape(0);
    Choice found;
    {
        nb::gil_scoped_release released;
        found = find_choice(logits.data(), size, names, sampler, seed, position, mass, rest);
    }
    return nb::make_tuple(found.place, found.top, found.mass, found.score);
}

// The noise of some tokens at one absolute position of one seed, into `found`.
void gumbel(uint64_t seed, uint64_t position, Tokens tokens, Floats found) {
    const uint64_t key = noise::key(seed, position);
    for (size_t i = 0; i < tokens.shape(0) && i < found.shape(0); ++i)
        found(i) = noise::gumbel(key, static_cast<uint64_t>(tokens(i)));
}

}  // namespace

void bind_sampling(nb::module_ &module) {
    using nb::arg;
    module.attr("LARGEST") = noise::LARGEST;
    module.def("gumbel", &gumbel, arg("seed"), arg("position"), arg("tokens"), arg("found"),
               nb::call_guard<nb::gil_scoped_release>());
    module.def("choose", &choose, arg("logits"), arg("temperature"), arg("top_k"), arg("top_p"),
               arg("log_min_p"), arg("seed"), arg("position"), arg("tokens") = nb::none(),
               arg("mass") = 0.0, arg("rest") = LOWEST);
}
