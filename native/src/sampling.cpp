// The choice of engine/sampling.py: the same token for every row, in about two passes over it.
//
// The row is divided into blocks whose largest logits are found first. What follows looks into the
// few blocks that matter: tokens that no cut drops and that can win, which are those not more than
// noise::LARGEST below the best score so far. What decides is computed as in Python, operation by
// operation. Only the mass of a nucleus is not, as its exponentials may differ in the last digits:
// where that could matter, no token is told, and Python decides.
#include "module.hpp"
#include "noise.hpp"
#include "passes.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

using passes::BLOCK, passes::LOWEST, passes::Passes;

// The passes that this processor can run, by name, the widest vectors last.
std::vector<std::pair<std::string, const Passes *>> known_passes() {
    std::vector<std::pair<std::string, const Passes *>> known{{"plain", &passes::plain}};
#if defined(WIDE_PASSES)
    if (__builtin_cpu_supports("avx2")) known.emplace_back("avx2", &passes::avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        known.emplace_back("avx512", &passes::avx512);
#endif
    return known;
}

const Passes *chosen_passes = known_passes().back().second;

std::vector<std::string> widths() {
    std::vector<std::string> names;
    for (const auto &each : known_passes()) names.push_back(each.first);
    return names;
}

// Go on with these passes, for tests.
void use_width(const std::string &name) {
    for (const auto &each : known_passes())
        if (each.first == name) chosen_passes = each.second;
}

// How far a mass may be off, as a share: ours, and one that was computed elsewhere.
constexpr double OWN_ERROR = 4e-6, GIVEN_ERROR = 4e-5;

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
        for (float score : scores) mass += passes::weight(score - peak);
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
        for (auto score = begin; score != equal; ++score) larger += passes::weight(*score - peak);
        if (above + larger >= wanted && equal != begin) {
            high = equal - scores.begin();
            continue;
        }
        above += larger + double(below - equal) * passes::weight(pivot - peak);
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
        if (!chosen_passes->find_draws(scores, tokens, key, wanted, draws, may)) return;
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
            const float *block = passes::block_of(row.logits, row.size, start, padded);
            chosen_passes->warp(block, start, divisor, floor, scores, tokens);
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
        mass = chosen_passes->find_mass(row.logits, row.size, row.maxima.data(), row.top, divisor);
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
    if (size == 0 || chosen_passes->find_maxima(logits, size, row.maxima.data())) return found;
    const auto block = std::max_element(row.maxima.begin(), row.maxima.end());
    row.top = *block;
    const float *from = logits + (block - row.maxima.begin()) * BLOCK;
    row.first = std::find(from, logits + size, row.top) - logits;
    const float peak = sampler.temperature > 0 ? row.top / sampler.temperature : row.top;
    if (!std::isfinite(peak)) return found;
    found.top = found.score = row.top;
    found.mass = chosen_passes->find_mass(logits, size, row.maxima.data(), row.top, 1);
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
    module.def("widths", &widths);
    module.def("use_width", &use_width, arg("name"));
    module.def("gumbel", &gumbel, arg("seed"), arg("position"), arg("tokens"), arg("found"),
               nb::call_guard<nb::gil_scoped_release>());
    module.def("choose", &choose, arg("logits"), arg("temperature"), arg("top_k"), arg("top_p"),
               arg("log_min_p"), arg("seed"), arg("position"), arg("tokens") = nb::none(),
               arg("mass") = 0.0, arg("rest") = LOWEST);
}
