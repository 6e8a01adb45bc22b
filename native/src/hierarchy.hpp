// Hierarchy drafting, compiled: engine/drafting/hierarchy.py and calibration.py are the reference.
//
// Trees and what is learned are equal to the reference's, digit for digit: every sum is made in the
// same order, and what is equal keeps the order in which it was found. The learned numbers lie in
// arrays of the reference's Calibration, so either may go on where the other stopped.
#pragma once
#include <chrono>
#include <cmath>
#include <limits>

#include "evidence.hpp"

namespace strata {

// What an evidence of one tier and match length is worth: arrays of EvidenceWeights and Rate.
struct Weights {
    double *values, *priors, *reached, *credited;  // by strength
    std::vector<double *> rates;                   // by rank: expected, accepted, factor
};

// The constants of calibration.py.
struct Constants {
    double prior_observations, memory, unseen;
};

// The constants of hierarchy.py.
struct Limits {
    double negligible, slight;
};

struct Tier {
    Source *source;
    const std::vector<Weights> *weights;  // by match length, from 1
    int credited;                         // number of the source that its tokens are credited to
    int timed;                            // number of the source that its time is counted to
};

// The room for one tree, and what the tree that is there looks like.
struct Plan {
    Suffix suffix;
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
    Hierarchy(std::vector<Tier> tiers, Constants constants, Limits limits);

    // Add the likeliest nodes until no further one pays; what is worth keeping is in `drafted`.
    void grow(Plan &plan);
    // The target said these tokens behind the suffix.
    void learn(Suffix suffix, const std::vector<Token> &said);
    // A drafted node whose parent was visited.
    void settle(const Candidate &candidate, bool accepted);
    // What the tiers learn now changes their answers.
    void forget();

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
    void expand(const Chain &chain, double floor);
    void interpolate(const Chain &chain, double least);
    int add(const Plan &plan, int parent, const Candidate &candidate, bool &known);

    Constants constants;
    Limits limits;
    std::uint64_t version = 0;
    Room room;
    std::vector<Chain> chains;
    std::vector<Evidence> evidence;
    std::vector<Followers> answers;
    std::vector<int> lengths;
    std::vector<Found> found;
    std::vector<int> places, ranked;  // of what was found, by token and by probability
    std::vector<Candidate> candidates;
    std::vector<Expanded> expanded;
    std::vector<Item> heap;
    std::vector<double> shares;
};

}  // namespace strata
