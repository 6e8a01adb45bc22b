// Hierarchy drafting, compiled: engine/drafting/hierarchy.py and calibration.py are the reference.
//
// Trees and what is learned are equal to the reference's, digit for digit: every sum is made in the
// same order, and what is equal keeps the order in which it was found. The learned numbers lie in
// arrays of the reference's Calibration, so either may go on where the other stopped.
#pragma once
#include <chrono>
#include <cmath>
#include <limits>

#include "errors.hpp"
#include "evidence.hpp"
#include "noise.hpp"

namespace strata {

// What an evidence of one tier and match length is worth: arrays of EvidenceWeights and Rate.
struct Weights {
    double *values, *priors, *reached, *credited;  // by strength
    std::vector<double *> rates;        // by rank: expected, accepted, factor
    std::vector<double *> noisy_rates;  // the same where the noise is known
};

// The constants of calibration.py.
struct Constants {
    double prior_observations, memory, unseen;
    Ranges ranges;
};

// The constants of hierarchy.py.
struct Limits {
    double negligible, slight;
    int luckiest;
};

// What the target chooses with. Without a temperature its noise is not known.
struct Dice {
    double temperature = 0;
    std::uint64_t seed = 0;
};

struct Tier {
    Source *source;
    const std::vector<Weights> *weights;  // by match length, 0 for what is often said
    int credited;                         // number of the source that its tokens are credited to
    int timed;                            // number of the source that its time is counted to
};

// The room for one tree, and what the tree that is there looks like.
struct Plan {
    Suffix suffix;
    std::uint64_t position = 0;  // of what follows the root
    int nodes = 0, depth = 0, best = 0, before = 0;
    std::uint64_t vocabulary = 0;
    bool near = false, measured = false, due = false;
    double floor = 0, expected = 1, worth = 0, cheapest = 0;
    std::vector<double> slopes, table;
    std::vector<Token> tokens;  // of the rows that are there, without the root
    std::vector<int> parents;

    bool pays(int size, double probability) const {
        if (size >= nodes || probability < floor) return false;
        if (!measured || (due && !size)) return true;
        return probability > expected * slopes[size];
    }
    void added(int size, double probability) {
        expected += probability;
        if (!measured) {
            best = size;
            return;
        }
        floor = std::max(floor, expected * cheapest);
        const double gained = expected / table[size];
        if (gained > worth) {
            worth = gained;
            best = size;
        }
    }
};

struct Candidate {
    double probability, share;  // after and before the rate is applied
    Token token;
    std::uint16_t tier, match_length, rank;
};

struct Node {
    int parent;
    Candidate candidate;
};

class Hierarchy {
  public:
    Hierarchy(std::vector<Tier> tiers, Constants constants, Limits limits, Dice dice,
              Errors errors);

    // Add the likeliest nodes until no further one pays; what is worth keeping is in `drafted`.
    void grow(Plan &plan);
    // The target said these tokens behind the suffix, the first at that position.
    void learn(Suffix suffix, std::uint64_t position, const std::vector<Token> &said);
    // A drafted node whose parent was visited.
    void settle(const Candidate &candidate, bool accepted);
    // What the tiers learn now changes their answers.
    void forget();
    // The same, for one suffix.
    void forget(const Suffix &suffix);

    std::vector<Node> drafted;
    std::vector<double> spent;  // seconds of look-ups by source
    std::vector<Tier> tiers;

  private:
    struct Evidence {
        const Weights *weights;
        Followers followers;
        std::uint16_t tier, match_length;
    };
    struct Chain {
        Suffix suffix;
        int asked, first, size;
    };
    struct Found {
        double share;
        Token token;
        int origin;
    };
    struct Ranked {
        double share;
        int at;  // in `found`
    };
    // What may follow a suffix at a position: a part of `named`, see Names.
    struct Law {
        Suffix suffix;
        std::uint64_t position;
        int asked, first, size, lucky;
    };
    // The luckiest of what a tier has often seen, at a position.
    struct Lucky {
        std::uint64_t position = ~std::uint64_t(0), version = 0;
        Followers often;
    };
    struct Luck {
        double score;
        Token token;
        double count;
        bool operator<(const Luck &other) const {
            return score != other.score ? score < other.score : token < other.token;
        }
    };
    struct Expanded {
        Suffix suffix;
        int row, depth;
    };
    struct Item {
        double probability;
        std::uint32_t number;
        int parent, candidate;  // in `expanded` and in `candidates`
        bool operator<(const Item &other) const {
            if (probability != other.probability) return probability < other.probability;
            return number > other.number;
        }
    };
    void refresh();
    void expect(int asked, const Item &item);
    Chain chain(int asked, const Suffix &suffix);
    void expand(int asked, const Expanded &here, std::uint64_t position, double floor);
    double interpolate(const Chain &chain, double least);
    void name(const Evidence &evidence, int number, double left, double least);
    void select(double floor);
    Law law(int asked, const Suffix &suffix, std::uint64_t position);
    Followers luckiest(int tier, std::uint64_t position);
    Names names(const Law &law) { return {named.data() + law.first, law.size, law.lucky}; }
    void judge(const Law &law, Token said);
    void learn(const Chain &chain, Token said);
    int add(const Plan &plan, int parent, const Candidate &candidate, bool &known);

    static constexpr std::size_t LUCKY = 64;  // positions that are remembered
    static constexpr int MOST_LUCKY = 8;

    Constants constants;
    Limits limits;
    Dice dice;
    Errors errors;
    std::uint64_t version = 0;
    Room room;
    std::vector<Chain> chains;
    std::vector<Evidence> evidence;
    std::vector<Evidence> pieces;
    std::vector<Followers> answers;
    std::vector<int> lengths;
    std::vector<Found> found;
    std::vector<int> places;  // of what was found, by token
    std::vector<Ranked> ranked;
    std::vector<Candidate> candidates;
    std::vector<Expanded> expanded;
    std::vector<Item> heap;
    std::vector<double> shares, chances;
    std::vector<Law> laws;
    std::vector<Named> named;
    std::vector<std::array<Lucky, LUCKY>> lucky;  // by tier
    std::vector<std::array<std::array<Follower, MOST_LUCKY>, LUCKY>> lucky_tokens;
    std::vector<Luck> lucks;
};

}  // namespace strata
