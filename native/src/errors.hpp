// How far estimates are to be trusted against the noise: engine/drafting/noise.py, compiled.
#pragma once
#include <algorithm>
#include <cmath>

#include "evidence.hpp"

namespace strata {

// A token that may follow: its probability, the logarithm of that, its noise, its first evidence.
struct Named {
    double share, log, noise;
    Token token;
    int origin;
};

// The constants of noise.py.
struct Ranges {
    double least, memory, low[3], high[3];
};

// The arrays of an ErrorModel.
struct Errors {
    double *values, *precisions;

    // The chance of each to be chosen, and that of all others together.
    double estimates(const Named *named, int size, double temperature, const Ranges &ranges,
                     double *chances) const {
        const double slope = values[0] * temperature;
        const double power = values[1] * std::sqrt(1.0 + slope * slope);
        const double others = std::exp(power * std::log(left(named, size, ranges)) + values[2]);
        double total = others;
        for (int at = 0; at < size; ++at) {
            chances[at] = std::exp(power * named[at].log + slope * named[at].noise);
            total += chances[at];
        }
        for (int at = 0; at < size; ++at) chances[at] /= total;
        return others / total;
    }

    // The target said number `said`, or what is none of them (-1).
    void learn(const Named *named, int size, double temperature, int said, const Ranges &ranges,
               double *chances) {
        const double others = estimates(named, size, temperature, ranges, chances);
        const double slope = values[0] * temperature, width = std::sqrt(1.0 + slope * slope);
        const double bend = temperature * values[1] * slope / width;
        const double mass = std::log(left(named, size, ranges));
        const double at_trust = bend * mass, at_sharpness = width * mass;
        double came[3] = {at_trust, at_sharpness, 1.0};
        double sums[2] = {others * at_trust, others * at_sharpness};
        double squares[2] = {sums[0] * at_trust, sums[1] * at_sharpness};
        for (int at = 0; at < size; ++at) {
            const double trust = temperature * named[at].noise + bend * named[at].log;
            const double sharpness = width * named[at].log;
            if (at == said) {
                came[0] = trust;
                came[1] = sharpness;
                came[2] = 0.0;
            }
            sums[0] += chances[at] * trust;
            sums[1] += chances[at] * sharpness;
            squares[0] += chances[at] * trust * trust;
            squares[1] += chances[at] * sharpness * sharpness;
        }
        move(0, came[0] - sums[0], squares[0] - sums[0] * sums[0], ranges);
        move(1, came[1] - sums[1], squares[1] - sums[1] * sums[1], ranges);
        move(2, came[2] - others, others - others * others, ranges);
    }

  private:
    static double left(const Named *named, int size, const Ranges &ranges) {
        double mass = 1.0;
        for (int at = 0; at < size; ++at) mass -= named[at].share;
        return std::max(mass, ranges.least);
    }
    void move(int which, double gradient, double curvature, const Ranges &ranges) {
        const double precision =
            std::min(precisions[which] + std::max(curvature, 0.0), ranges.memory);
        precisions[which] = precision;
        const double moved = values[which] + gradient / precision;
        values[which] = std::min(std::max(moved, ranges.low[which]), ranges.high[which]);
    }
};

}  // namespace strata
