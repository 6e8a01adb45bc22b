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

// All that may follow at a position. Those from `lucky` on were named for their noise alone.
struct Names {
    const Named *first;
    int size, lucky;
};

// The constants of noise.py: of trust, sharpness, log c and log d.
struct Ranges {
    double least, memory, low[4], high[4];
};

// The arrays of an ErrorModel.
struct Errors {
    double *values, *precisions;

    // The chance of each to be chosen, and that of all others together.
    double estimates(const Names &names, double temperature, const Ranges &ranges,
                     double *chances) const {
        const double slope = values[0] * temperature;
        const double power = values[1] * std::sqrt(1.0 + slope * slope);
        const double others = std::exp(power * std::log(left(names, ranges)) + values[2]);
        double total = others;
        for (int at = 0; at < names.size; ++at) {
            const double score = power * names.first[at].log + slope * names.first[at].noise;
            chances[at] = std::exp(at < names.lucky ? score : score + values[3]);
            total += chances[at];
        }
        for (int at = 0; at < names.size; ++at) chances[at] /= total;
        return others / total;
    }

    // The target said number `said`, or what is none of them (-1).
    void learn(const Names &names, double temperature, int said, const Ranges &ranges,
               double *chances) {
        const double others = estimates(names, temperature, ranges, chances);
        const double slope = values[0] * temperature, width = std::sqrt(1.0 + slope * slope);
        const double bend = temperature * values[1] * slope / width;
        const double mass = std::log(left(names, ranges));
        double came[2] = {bend * mass, width * mass};
        double means[2] = {others * came[0], others * came[1]};
        double squares[2] = {others * came[0] * came[0], others * came[1] * came[1]};
        double lucky = 0.0;
        for (int at = 0; at < names.size; ++at) {
            const Named &each = names.first[at];
            const double trusted = temperature * each.noise + bend * each.log;
            const double sharpened = width * each.log;
            if (at == said) {
                came[0] = trusted;
                came[1] = sharpened;
            }
            means[0] += chances[at] * trusted;
            means[1] += chances[at] * sharpened;
            squares[0] += chances[at] * trusted * trusted;
            squares[1] += chances[at] * sharpened * sharpened;
            if (at >= names.lucky) lucky += chances[at];
        }
        move(0, came[0] - means[0], squares[0] - means[0] * means[0], ranges);
        move(1, came[1] - means[1], squares[1] - means[1] * means[1], ranges);
        move(2, (said < 0 ? 1.0 : 0.0) - others, others - others * others, ranges);
        move(3, (said >= names.lucky ? 1.0 : 0.0) - lucky, lucky - lucky * lucky, ranges);
    }

  private:
    static double left(const Names &names, const Ranges &ranges) {
        double mass = 1.0;
        for (int at = 0; at < names.size; ++at) mass -= names.first[at].share;
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
